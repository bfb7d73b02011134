//! Moves on a GPU.

use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::error::Result;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("layout.cu", include_str!("../layout.cu"), Build::FLOATS);

/// The most blocks along a grid's second and third dimension.
const MOST: usize = 65535;

/// `y` becomes each of x's [rows, columns] matrices, transposed.
pub(super) fn transpose(cuda: &Cuda, x: &Tensor, y: &mut Tensor, rows: usize, columns: usize) -> Result<()> {
    let batch = x.len() / (rows * columns);
    assert!(rows.div_ceil(32) <= MOST, "a transpose of {rows} rows");
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "layout_transpose")?;
    let args = Args::new().input(x).output(y).size(batch).size(rows).size(columns);
    let grid = (lanes::blocks(columns, 32), lanes::blocks(rows, 32), batch.min(MOST) as u32);
    // SAFETY: x and y have the batch's rows x columns elements.
    unsafe { kernel.launch(grid, (32, 8), 0, args) }
}

/// `y` becomes x's rows, cropped or with zeros appended.
pub(super) fn resize(cuda: &Cuda, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let (rows, c, channels) = (x.rows(), x.width(), y.width());
    let across = (channels / lanes::width(channels, x.dtype())).next_power_of_two().min(32) as u32;
    let down = THREADS / across;
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "layout_resize")?;
    let args = Args::new().input(x).output(y).size(rows).size(c).size(channels);
    // SAFETY: x is [rows, c], y [rows, channels].
    unsafe { kernel.launch(lanes::blocks(rows, down as usize), (across, down), 0, args) }
}
