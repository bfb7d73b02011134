//! Activations on a GPU.

use super::ActivationFn;
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[KernelInclude::LANES, FORMULAS],
    ..lanes::source("activation.cu", include_str!("../activation.cu"), Build::FLOATS)
};

/// What the functions are of one number.
pub(crate) const FORMULAS: KernelInclude =
    KernelInclude { name: "activation/formulas.cuh", text: include_str!("formulas.cuh") };

/// The kernels' number for a function.
pub(crate) fn number(kind: ActivationFn) -> i32 {
    match kind {
        ActivationFn::Relu => 0,
        ActivationFn::Gelu => 1,
        ActivationFn::Silu => 2,
        ActivationFn::GeluErf => 3,
        ActivationFn::Tanh => 4,
    }
}

pub(super) fn forward(cuda: &Cuda, kind: ActivationFn, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let n = x.len();
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "activation_forward")?;
    let args = Args::new().input(x).output(y).size(n).i32(number(kind));
    // SAFETY: y was made like x, of n elements.
    unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args) }
}

/// dx; y, where there is one, is overwritten with the function's value at what was saved.
pub(super) fn backward(
    cuda: &Cuda,
    kind: ActivationFn,
    saved: &Tensor,
    mut dy: Tensor,
    y: Option<&mut Tensor>,
) -> Result<Tensor> {
    assert_eq!(saved.dtype(), dy.dtype(), "activation: what was saved and dy");
    let n = dy.len();
    let kernel = cuda.kernel(&SOURCE, Build::of(dy.dtype()), "activation_backward")?;
    let mut other = if dy.is_unique() { None } else { Some(dy.empty_like(Category::Transient)?) };
    let from = dy.cuda_buffer().address();
    let dx = other.as_mut().unwrap_or(&mut dy);
    let args = Args::new().input(saved).pointer(from).output(dx).optional_output(y);
    // SAFETY: all are of n elements of one type; the kernel lets dx be dy.
    unsafe { kernel.launch(lanes::elements(n), THREADS, 0, args.size(n).i32(number(kind)))? };
    Ok(other.unwrap_or(dy))
}
