//! Convolution on a card: by cuDNN where it loads and serves the shape, otherwise by kernels of ours, the product of
//! patches, gathered on the way, with the reordered weight.

use super::{Conv, Sizes, dnn, thin};
use crate::cuda::{Args, Build, Cuda, Part, Source};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::cast::cast;
use crate::ops::lanes::{self, Columns, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: Source = Source {
    parts: &[
        Part::LANES,
        Part::COPIES,
        Part::TENSOR_CORES,
        Part { name: "conv/patches.cuh", text: include_str!("patches.cuh") },
        Part { name: "conv/product_f32.cuh", text: include_str!("product_f32.cuh") },
        Part { name: "conv/product_bf16.cuh", text: include_str!("product_bf16.cuh") },
        Part { name: "conv/filter.cuh", text: include_str!("filter.cuh") },
        Part { name: "conv/thin.cuh", text: include_str!("thin.cuh") },
    ],
    ..lanes::source("conv.cu", include_str!("../conv.cu"), Build::FLOATS)
};

/// Blocks of the weight's gradient that fill a card; the sum over pixels is cut to have about as many.
const BLOCKS: usize = 512;
/// The fewest pixels that are worth a split.
const SHARE: usize = 256;
/// Elements of a weight that a block moves through shared memory.
const FILTER_SLICE: usize = 4096;

pub(super) fn forward(
    cuda: &Cuda,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    z: &Sizes,
) -> Result<Tensor> {
    let bias = match bias {
        Some(bias) if bias.dtype() != x.dtype() => Some(cast(bias, x.dtype(), Category::Workspace)?),
        bias => bias.cloned(),
    };
    if let Some(y) = dnn::forward(cuda, x, w, bias.as_ref(), z)? {
        return Ok(y);
    }
    let mut y = Tensor::empty(&x.device(), &z.output_shape(), x.dtype(), Category::Transient)?;
    if thin::serves(z, x.dtype()) {
        thin::forward(cuda, x, w, bias.as_ref(), z, &mut y)?;
        return Ok(y);
    }
    let rows = filter_rows(cuda, w, z.c)?;
    let args = Args::new().input(x).input(&rows).optional_input(bias.as_ref()).output(&mut y);
    let (grid, shared) = tiles(z.batch * z.oh * z.ow, z.o, x.dtype());
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "conv_forward")?;
    // SAFETY: x and y have the shapes of this call, `rows` as many elements as w, and the bias is [o].
    unsafe { kernel.launch(grid, THREADS, shared, args.fields(&shape(z)))? };
    Ok(y)
}

pub(super) fn backward_input(cuda: &Cuda, dy: &Tensor, w: &Tensor, z: &Sizes) -> Result<Tensor> {
    if let Some(dx) = dnn::backward_input(cuda, dy, w, z)? {
        return Ok(dx);
    }
    let mut rows = w.empty_like(Category::Workspace)?;
    let args = Args::new().input(w).output(&mut rows).fields(&shape(z));
    let kernel = cuda.kernel(&SOURCE, Build::of(w.dtype()), "conv_input_weight")?;
    // SAFETY: both have o c kernel kernel elements.
    unsafe { kernel.launch(lanes::blocks(w.len(), THREADS as usize), THREADS, 0, args)? };
    let mut dx = Tensor::empty(&dy.device(), &z.input_shape(), dy.dtype(), Category::Transient)?;
    let args = Args::new().input(dy).input(&rows).output(&mut dx);
    let (grid, shared) = tiles(z.batch * z.h * z.w, z.c, dy.dtype());
    let kernel = cuda.kernel(&SOURCE, Build::of(dy.dtype()), "conv_backward_input")?;
    // SAFETY: dy and dx have the shapes of this call, and `rows` as many elements as w.
    unsafe { kernel.launch(grid, THREADS, shared, args.fields(&shape(z)))? };
    Ok(dx)
}

pub(super) fn backward_weight(cuda: &Cuda, x: &Tensor, dy: &Tensor, z: &Sizes) -> Result<Tensor> {
    if let Some(dw) = dnn::backward_weight(cuda, x, dy, z)? {
        return Ok(dw);
    }
    let partial = match thin::serves(z, x.dtype()) {
        true => thin::backward_weight(cuda, x, dy, z)?,
        false => splits(cuda, x, dy, z)?,
    };
    let (splits, window, build) = (partial.shape()[0], z.window(), Build::of(x.dtype()));
    let mut dw = Tensor::empty(&x.device(), &z.weight_shape(), x.dtype(), Category::Workspace)?;
    let args = Args::new().input(&partial).output(&mut dw).size(splits).fields(&shape(z));
    let block = total_block(splits);
    let grid = lanes::blocks(z.o * window, block.0 as usize);
    // SAFETY: `partial` is [splits, o, window], and dw has o x window elements.
    unsafe { cuda.kernel(&SOURCE, build, "conv_weight_total")?.launch(grid, block, 0, args)? };
    Ok(dw)
}

/// The sums over splits of the pixels, `[splits, o, window]`.
fn splits(cuda: &Cuda, x: &Tensor, dy: &Tensor, z: &Sizes) -> Result<Tensor> {
    let (pixels, window) = (z.batch * z.oh * z.ow, z.window());
    let width = if x.dtype() == DType::F32 { 64 } else { 128 };
    let (across, down) = (window.div_ceil(width), z.o.div_ceil(64));
    // How the sum is cut follows from the shapes, so that it repeats.
    let splits = BLOCKS.div_ceil(across * down);
    let share = pixels.div_ceil(splits).max(SHARE).next_multiple_of(32);
    let splits = pixels.div_ceil(share);
    let mut partial = Tensor::empty(&x.device(), &[splits, z.o, window], DType::F32, Category::Workspace)?;
    let args = Args::new().input(x).input(dy).output(&mut partial).fields(&shape(z)).i32(share as i32);
    let grid = (across as u32, down as u32, splits as u32);
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "conv_backward_weight")?;
    // SAFETY: x and dy have the shapes of this call, and each split its o x window numbers in `partial`.
    unsafe { kernel.launch(grid, THREADS, 0, args)? };
    Ok(partial)
}

/// The block that adds up so many splits: a thread takes at least eight of them.
fn total_block(splits: usize) -> (u32, u32) {
    let down = 1 << (splits / 8).max(1).ilog2().min(3);
    (THREADS / down, down)
}

/// The weight [o, c, kernel, kernel] as rows [o, kernel, kernel, channels], zeros past c.
pub(super) fn filter_rows(cuda: &Cuda, w: &Tensor, channels: usize) -> Result<Tensor> {
    let &[o, c, kernel, _] = w.shape() else { panic!("a convolution's weight {:?}", w.shape()) };
    let shape = [o, kernel, kernel, channels];
    let mut rows = Tensor::empty(&w.device(), &shape, w.dtype(), Category::Workspace)?;
    let (grid, shared, numbers) = filter_move([o, c, kernel, channels], w.dtype());
    let args = numbers.into_iter().fold(Args::new().input(w).output(&mut rows), Args::i32);
    let kernel = cuda.kernel(&SOURCE, Build::of(w.dtype()), "conv_filter_rows")?;
    // SAFETY: w is [o, c, taps], the rows are [o, taps, channels], and the numbers say so.
    unsafe { kernel.launch(grid, THREADS, shared, args)? };
    Ok(rows)
}

/// What undoes [`filter_rows`], for the gradient.
pub(super) fn filter_back(cuda: &Cuda, rows: &Tensor, c: usize) -> Result<Tensor> {
    let &[o, kernel, _, channels] = rows.shape() else { panic!("rows of a weight {:?}", rows.shape()) };
    let mut dw = Tensor::empty(&rows.device(), &[o, c, kernel, kernel], rows.dtype(), Category::Workspace)?;
    let (grid, shared, numbers) = filter_move([o, c, kernel, channels], rows.dtype());
    let args = numbers.into_iter().fold(Args::new().input(rows).output(&mut dw), Args::i32);
    let kernel = cuda.kernel(&SOURCE, Build::of(rows.dtype()), "conv_filter_back")?;
    // SAFETY: as above, the other way round.
    unsafe { kernel.launch(grid, THREADS, shared, args)? };
    Ok(dw)
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

/// Adds the bias to every pixel of y.
pub(super) fn add_bias(cuda: &Cuda, y: &mut Tensor, bias: &Tensor) -> Result<()> {
    let (rows, o, dtype) = (y.rows(), y.width(), y.dtype());
    let Columns { grid, block, piece, .. } = lanes::columns(rows, o, dtype);
    let args = Args::new().output(y).input(bias).size(rows).size(o).size(piece);
    // SAFETY: y is [rows, o], the bias [o], of one type.
    unsafe { cuda.kernel(&SOURCE, Build::of(dtype), "conv_add_bias")?.launch(grid, block, 0, args) }
}

/// Blocks and shared memory of a product with so many rows and columns.
fn tiles(rows: usize, columns: usize, dtype: DType) -> (u32, u32) {
    let (height, width) = match dtype {
        DType::F32 => (64, 64),
        _ if columns <= 64 => (128, 64),
        _ => (128, 128),
    };
    let shared = if dtype == DType::F32 { 0 } else { (128 + width as u32) * 240 };
    (lanes::blocks(rows.div_ceil(height) * columns.div_ceil(width), 1), shared)
}

/// The kernels' struct of sizes.
pub(super) fn shape(z: &Sizes) -> [u32; 11] {
    let most = (z.batch * z.h * z.w).max(z.batch * z.oh * z.ow);
    assert!(most < 1 << 31, "a convolution of {most} pixels: their numbers have 31 bits");
    let Conv { kernel, stride, padding } = z.conv;
    [z.batch, z.h, z.w, z.c, z.oh, z.ow, z.o, kernel, stride, padding.top, padding.left]
        .map(|n| i32::try_from(n).expect("an image's extents have 31 bits") as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, from the head of `conv.cu`.
    #[test]
    fn the_geometry_is_what_the_kernels_expect() {
        assert_eq!([1, 8, 15, 16, 33, 64, 512].map(|n| total_block(n).1), [1, 1, 1, 2, 4, 8, 8]);
        assert_eq!(total_block(512).0, 32);
        let moved = filter_move([64, 512, 3, 512], DType::F32);
        assert_eq!(moved, ((2, 64), 256 * 9 * 4, [512, 512, 9, 8]));
        let moved = filter_move([16, 3, 7, 8], DType::Bf16);
        assert_eq!(moved, ((1, 16), 8 * 49 * 2, [3, 8, 49, 3]));
        assert_eq!(filter_move([1, 1, 1, 1], DType::F32), ((1, 1), 4, [1, 1, 1, 0]));
    }
}
