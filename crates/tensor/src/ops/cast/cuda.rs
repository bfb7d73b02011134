//! Casts on a GPU.

use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::error::Result;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = lanes::source("cast.cu", include_str!("../cast.cu"), Build::FLOATS);

pub(super) fn cast(cuda: &Cuda, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let n = x.len();
    let name = y.dtype().by_float("cast_to_f32", "cast_to_bf16");
    let args = Args::new().input(x).output(y).size(n);
    // SAFETY: y has x's shape and the type that the kernel is for.
    unsafe { cuda.kernel(&SOURCE, Build::of(x.dtype()), name)?.launch(lanes::elements(n), THREADS, 0, args) }
}
