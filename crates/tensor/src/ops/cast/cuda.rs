//! Casts on a GPU.

use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = lanes::source("cast.cu", include_str!("../cast.cu"), Build::FLOATS);

pub(super) fn cast(cuda: &Cuda, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let n = x.len();
    let name = match y.dtype() {
        DType::F32 => "cast_to_f32",
        DType::Bf16 => "cast_to_bf16",
        DType::U16 | DType::U32 | DType::U8 => panic!("a cast to integers"),
    };
    let args = Args::new().input(x).output(y).size(n);
    // SAFETY: y has x's shape and the type that the kernel is for.
    unsafe { cuda.kernel(&SOURCE, Build::of(x.dtype()), name)?.launch(lanes::elements(n), THREADS, 0, args) }
}
