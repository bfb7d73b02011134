//! Gated units on a GPU.

use super::ActivationFn;
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::error::Result;
use crate::ops::activation::cuda::{FORMULAS, number};
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[KernelInclude::LANES, FORMULAS],
    ..lanes::source("gated.cu", include_str!("../gated.cu"), Build::FLOATS)
};

/// Grid and block over rows of n outputs.
fn geometry(x: &Tensor, n: usize) -> (u32, (u32, u32)) {
    let across = (n / lanes::width(n, x.dtype())).next_power_of_two().min(32) as u32;
    let down = THREADS / across;
    (lanes::blocks(x.rows(), down as usize), (across, down))
}

pub(super) fn forward(cuda: &Cuda, kind: ActivationFn, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let n = x.width() / 2;
    let (grid, block) = geometry(x, n);
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "gated_forward")?;
    let args = Args::new().input(x).output(y).size(x.rows()).size(n).i32(number(kind));
    // SAFETY: x is [rows, 2 n] and y [rows, n], of one type.
    unsafe { kernel.launch(grid, block, 0, args) }
}

/// y, where there is one, is overwritten with what the forward pass made.
pub(super) fn backward(
    cuda: &Cuda,
    kind: ActivationFn,
    x: &Tensor,
    dy: &Tensor,
    dx: &mut Tensor,
    y: Option<&mut Tensor>,
) -> Result<()> {
    let n = x.width() / 2;
    let (grid, block) = geometry(x, n);
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "gated_backward")?;
    let args = Args::new().input(x).input(dy).output(dx).optional_output(y);
    // SAFETY: x and dx are [rows, 2 n], dy and y [rows, n], of one type.
    unsafe { kernel.launch(grid, block, 0, args.size(x.rows()).size(n).i32(number(kind))) }
}
