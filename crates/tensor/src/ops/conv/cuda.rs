//! Convolution on a card: the product of patches, gathered on the way, with the reordered weight.

use super::Sizes;
use crate::cuda::lanes::{self, THREADS};
use crate::cuda::{Args, Build, Cuda, Source};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::cast::cast;
use crate::tensor::Tensor;

pub(crate) static SOURCE: Source = lanes::source("conv.cu", include_str!("../conv.cu"), Build::FLOATS);

/// Blocks of the weight's gradient that fill a card; the sum over pixels is cut to have about as many.
const BLOCKS: usize = 512;
/// The fewest pixels that are worth a split.
const SHARE: usize = 256;

pub(super) fn forward(
    cuda: &Cuda,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    z: &Sizes,
) -> Result<Tensor> {
    let rows = reordered(cuda, w, z, "conv_forward_weight")?;
    let bias = match bias {
        Some(bias) if bias.dtype() != x.dtype() => Some(cast(bias, x.dtype(), Category::Workspace)?),
        bias => bias.cloned(),
    };
    let mut y = Tensor::empty(&x.device(), &z.output_shape(), x.dtype(), Category::Activations)?;
    let args = Args::new().input(x).input(&rows).optional_input(bias.as_ref()).output(&mut y);
    let (grid, shared) = tiles(z.batch * z.oh * z.ow, z.o, x.dtype());
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "conv_forward")?;
    // SAFETY: x and y have the shapes of this call, `rows` as many elements as w, and the bias is [o].
    unsafe { kernel.launch(grid, THREADS, shared, args.fields(&shape(z)))? };
    Ok(y)
}

pub(super) fn backward_input(cuda: &Cuda, dy: &Tensor, w: &Tensor, z: &Sizes) -> Result<Tensor> {
    let rows = reordered(cuda, w, z, "conv_input_weight")?;
    let mut dx = Tensor::empty(&dy.device(), &z.input_shape(), dy.dtype(), Category::Activations)?;
    let args = Args::new().input(dy).input(&rows).output(&mut dx);
    let (grid, shared) = tiles(z.batch * z.h * z.w, z.c, dy.dtype());
    let kernel = cuda.kernel(&SOURCE, Build::of(dy.dtype()), "conv_backward_input")?;
    // SAFETY: dy and dx have the shapes of this call, and `rows` as many elements as w.
    unsafe { kernel.launch(grid, THREADS, shared, args.fields(&shape(z)))? };
    Ok(dx)
}

pub(super) fn backward_weight(cuda: &Cuda, x: &Tensor, dy: &Tensor, z: &Sizes) -> Result<Tensor> {
    let build = Build::of(x.dtype());
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
    let kernel = cuda.kernel(&SOURCE, build, "conv_backward_weight")?;
    // SAFETY: x and dy have the shapes of this call, and each split its o x window numbers in `partial`.
    unsafe { kernel.launch(grid, THREADS, 0, args)? };

    let mut dw = Tensor::empty(&x.device(), &z.weight_shape(), x.dtype(), Category::Workspace)?;
    let args = Args::new().input(&partial).output(&mut dw).size(splits).fields(&shape(z));
    let grid = lanes::blocks(z.o * window, THREADS as usize);
    // SAFETY: `partial` is [splits, o, window], and dw has o x window elements.
    unsafe { cuda.kernel(&SOURCE, build, "conv_weight_total")?.launch(grid, THREADS, 0, args)? };
    Ok(dw)
}

/// The weight in the order in which a pass reads it.
fn reordered(cuda: &Cuda, w: &Tensor, z: &Sizes, name: &'static str) -> Result<Tensor> {
    let mut rows = w.empty_like(Category::Workspace)?;
    let args = Args::new().input(w).output(&mut rows).fields(&shape(z));
    let grid = lanes::blocks(w.len(), THREADS as usize);
    // SAFETY: both have o c kernel kernel elements.
    unsafe { cuda.kernel(&SOURCE, Build::of(w.dtype()), name)?.launch(grid, THREADS, 0, args)? };
    Ok(rows)
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
fn shape(z: &Sizes) -> [u32; 10] {
    let most = (z.batch * z.h * z.w).max(z.batch * z.oh * z.ow);
    assert!(most < 1 << 31, "a convolution of {most} pixels: their numbers have 31 bits");
    let (kernel, stride, padding) = (z.conv.kernel, z.conv.stride, z.conv.padding);
    [z.batch, z.h, z.w, z.c, z.oh, z.ow, z.o, kernel, stride, padding]
        .map(|n| i32::try_from(n).expect("an image's extents have 31 bits") as u32)
}
