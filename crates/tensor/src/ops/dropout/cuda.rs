//! Dropout on a GPU.

use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::error::Result;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

use super::ElementNumbering;

pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[KernelInclude::LANES, KernelInclude::RANDOM],
    ..lanes::source("dropout.cu", include_str!("../dropout.cu"), Build::FLOATS)
};

pub(super) fn apply(
    cuda: &Cuda,
    x: &Tensor,
    y: &mut Tensor,
    threshold: u32,
    scale: f32,
    key: u64,
    numbers: ElementNumbering,
) -> Result<()> {
    let n = x.len();
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "dropout_apply")?;
    let args = Args::new().input(x).output(y).size(n).u32(threshold).f32(scale).u64(key);
    let args = args.u64(numbers.first).u64(numbers.run).u64(numbers.of);
    // SAFETY: y was made like x, of n elements.
    unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }
}
