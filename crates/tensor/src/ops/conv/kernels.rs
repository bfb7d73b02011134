//! Our kernels of convolutions: their source, the sizes that all of them get, and those that serve cuDNN too:
//! weights in the order of rows, and the bias.

use super::{ConvDims, ConvParams};
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::lanes::{self, ColumnSumLaunch, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[
        KernelInclude::LANES,
        KernelInclude::COPIES,
        KernelInclude::TENSOR_CORES,
        KernelInclude { name: "conv/patches.cuh", text: include_str!("patches.cuh") },
        KernelInclude { name: "conv/product_f32.cuh", text: include_str!("product_f32.cuh") },
        KernelInclude { name: "conv/product_bf16.cuh", text: include_str!("product_bf16.cuh") },
        KernelInclude { name: "conv/thin.cuh", text: include_str!("thin.cuh") },
    ],
    ..lanes::source("conv.cu", include_str!("../conv.cu"), Build::FLOATS)
};

/// Copies of weights in another order.
pub(crate) static FILTER: KernelSource = lanes::source("filter.cu", include_str!("filter.cu"), Build::FLOATS);

/// Elements of a weight that a block moves through shared memory.
const FILTER_SLICE: usize = 4096;

/// The kernels' struct of sizes.
pub(super) fn shape(z: &ConvDims) -> [u32; 11] {
    let most = (z.batch * z.h * z.w).max(z.batch * z.oh * z.ow);
    assert!(most < 1 << 31, "a convolution of {most} pixels: their numbers have 31 bits");
    let ConvParams { kernel, stride, padding } = z.conv;
    [z.batch, z.h, z.w, z.c, z.oh, z.ow, z.o, kernel, stride, padding.top, padding.left]
        .map(|n| i32::try_from(n).expect("an image's extents have 31 bits") as u32)
}

/// The weight [o, c, kernel, kernel] as rows [o, kernel, kernel, channels], zeros past c.
pub(super) fn filter_rows(cuda: &Cuda, w: &Tensor, channels: usize) -> Result<Tensor> {
    let &[o, c, kernel, _] = w.shape() else { panic!("a convolution's weight {:?}", w.shape()) };
    let shape = [o, kernel, kernel, channels];
    if is_in_order(kernel, c, channels) {
        return Ok(w.clone().reshape(&shape));
    }
    let mut rows = Tensor::empty(&w.device(), &shape, w.dtype(), Category::Workspace)?;
    let (grid, shared, numbers) = filter_move([o, c, kernel, channels], w.dtype());
    let args = numbers.into_iter().fold(Args::new().input(w).output(&mut rows), Args::i32);
    let kernel = cuda.kernel(&FILTER, Build::of(w.dtype()), "filter_rows")?;
    // SAFETY: w is [o, c, taps], the rows are [o, taps, channels], and the numbers say so.
    unsafe { kernel.launch(grid, THREADS, shared, args)? };
    Ok(rows)
}

/// What undoes [`filter_rows`], for the gradient.
pub(super) fn filter_back(cuda: &Cuda, rows: &Tensor, c: usize) -> Result<Tensor> {
    let &[o, kernel, _, channels] = rows.shape() else { panic!("rows of a weight {:?}", rows.shape()) };
    if is_in_order(kernel, c, channels) {
        return Ok(rows.clone().reshape(&[o, c, kernel, kernel]));
    }
    let mut dw = Tensor::empty(&rows.device(), &[o, c, kernel, kernel], rows.dtype(), Category::Workspace)?;
    let (grid, shared, numbers) = filter_move([o, c, kernel, channels], rows.dtype());
    let args = numbers.into_iter().fold(Args::new().input(rows).output(&mut dw), Args::i32);
    let kernel = cuda.kernel(&FILTER, Build::of(rows.dtype()), "filter_back")?;
    // SAFETY: as above, the other way round.
    unsafe { kernel.launch(grid, THREADS, shared, args)? };
    Ok(dw)
}

/// Whether both orders of a weight are the same: each output has a row of channels and no more.
fn is_in_order(kernel: usize, c: usize, channels: usize) -> bool {
    kernel == 1 && c == channels
}

/// Grid, shared memory and numbers of the two kernels above.
fn filter_move([o, c, kernel, channels]: [usize; 4], dtype: DType) -> ((u32, u32), u32, [i32; 4]) {
    let taps = kernel * kernel;
    // As many channels as fill a few kilobytes, a power of two of them.
    let run = (FILTER_SLICE / taps).clamp(1, channels.next_power_of_two());
    let shift = run.ilog2();
    let numbers = [c, channels, taps, shift as usize].map(|n| i32::try_from(n).expect("sizes of a weight"));
    let shared = (taps << shift) * dtype.bytes();
    ((lanes::blocks(channels, 1 << shift), lanes::blocks(o, 1)), shared as u32, numbers)
}

/// Adds the bias to every pixel of y, and sets what is negative to zero where ReLU stands behind.
pub(super) fn add_bias(cuda: &Cuda, y: &mut Tensor, bias: &Tensor, relu: bool) -> Result<()> {
    let (rows, o, dtype) = (y.rows(), y.width(), y.dtype());
    let ColumnSumLaunch { grid, block, chunk, .. } = lanes::columns(rows, o, dtype);
    let args = Args::new().output(y).input(bias).i32(relu.into()).size(rows).size(o).size(chunk);
    // SAFETY: y is [rows, o], the bias [o], of one type.
    unsafe { cuda.kernel(&SOURCE, Build::of(dtype), "conv_add_bias")?.launch(grid, block, 0, args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, from the head of `filter.cu`.
    #[test]
    fn weights_are_moved_as_the_kernels_expect() {
        let moved = filter_move([64, 512, 3, 512], DType::F32);
        assert_eq!(moved, ((2, 64), 256 * 9 * 4, [512, 512, 9, 8]));
        let moved = filter_move([16, 3, 7, 8], DType::Bf16);
        assert_eq!(moved, ((1, 16), 8 * 49 * 2, [3, 8, 49, 3]));
        assert_eq!(filter_move([1, 1, 1, 1], DType::F32), ((1, 1), 4, [1, 1, 1, 0]));
    }
}
