//! The largest element on a GPU, by one block: what it reads is small beside what made it.

use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::error::Result;
use crate::ops::lanes;
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("argmax.cu", include_str!("../argmax.cu"), Build::FLOATS);

pub(super) fn argmax(cuda: &Cuda, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "argmax")?;
    let args = Args::new().input(x).output(y).size(x.len());
    // SAFETY: x has as many elements, y is one u32; the block waits before it reads.
    unsafe { kernel.launch_early(1, 1024, 1, args) }
}
