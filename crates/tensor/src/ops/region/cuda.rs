//! Rectangles of pixels on a GPU.

use super::Rectangle;
use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::error::Result;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("region.cu", include_str!("../region.cu"), Build::FLOATS);

pub(super) fn take(cuda: &Cuda, x: &Tensor, at: &Rectangle, slice: &mut Tensor) -> Result<()> {
    launch(cuda, "region_take", Args::new().input(x).output(slice), at, x.dtype())
}

pub(super) fn merge(cuda: &Cuda, x: &mut Tensor, at: &Rectangle, slice: &Tensor, add: bool) -> Result<()> {
    let kernel = if add { "region_add" } else { "region_put" };
    launch(cuda, kernel, Args::new().input(slice).output(x), at, slice.dtype())
}

fn launch(cuda: &Cuda, kernel: &'static str, args: Args, at: &Rectangle, dtype: crate::DType) -> Result<()> {
    let Rectangle { batch, rows, run, image, row, first, c } = *at;
    let across = (run / lanes::width(c, dtype)).next_power_of_two().min(32) as u32;
    let down = THREADS / across;
    let numbers = [batch * rows, rows, run, image, row, first, c];
    let args = numbers.into_iter().fold(args, Args::size);
    let grid = lanes::blocks(batch * rows, down as usize);
    // SAFETY: the slice is [batch rows, run]; each of its lines lies within the images of x, as the rectangle
    // was checked.
    unsafe { cuda.kernel(&SOURCE, Build::of(dtype), kernel)?.launch(grid, (across, down), 0, args) }
}
