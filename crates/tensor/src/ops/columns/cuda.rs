//! Columns on a GPU.

use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::error::Result;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("columns.cu", include_str!("../columns.cu"), Build::FLOATS);

/// Columns of x from `first` on become those of y from `to` on.
pub(super) fn copy(
    cuda: &Cuda,
    x: &Tensor,
    first: usize,
    y: &mut Tensor,
    to: usize,
    columns: usize,
) -> Result<()> {
    let (rows, from_width, to_width) = (x.rows(), x.width(), y.width());
    let all = [columns, from_width, first, to_width, to];
    let width = all.into_iter().map(|n| lanes::width(n, x.dtype())).min().expect("five numbers");
    let across = (columns / width).next_power_of_two().min(32) as u32;
    let down = THREADS / across;
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "columns_copy")?;
    let args = Args::new().input(x).output(y).size(rows);
    let args = all.into_iter().fold(args, |args, n| args.size(n));
    // SAFETY: x has `columns` from `first` on in each of its rows, y as many from `to` on, in as many rows.
    unsafe { kernel.launch(lanes::blocks(rows, down as usize), (across, down), 0, args) }
}
