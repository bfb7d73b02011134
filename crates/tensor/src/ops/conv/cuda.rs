//! Convolution on a GPU: by cuDNN where it loads and serves the shape, otherwise by kernels of ours, the
//! product of patches, gathered on the way, with the reordered weight.

use super::kernels::{SOURCE, shape};
use super::{ConvDims, dnn, thin};
use crate::cuda::{Args, Build, Cuda};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::activation::{self, ActivationFn};
use crate::ops::cast::cast;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

/// Blocks of the weight's gradient that fill a GPU; the sum over pixels is split to have about as many.
const BLOCKS: usize = 512;
/// The fewest pixels that are worth a split.
const MIN_PIXELS: usize = 256;

pub(super) fn forward(
    cuda: &Cuda,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    relu: bool,
    z: &ConvDims,
) -> Result<Tensor> {
    let bias = match bias {
        Some(bias) if bias.dtype() != x.dtype() => Some(cast(bias, x.dtype(), Category::Workspace)?),
        bias => bias.cloned(),
    };
    if let Some(y) = dnn::forward(cuda, x, w, bias.as_ref(), relu, z)? {
        return Ok(y);
    }
    let y = own_forward(cuda, x, w, bias.as_ref(), z)?;
    if relu { activation::forward(ActivationFn::Relu, &y) } else { Ok(y) }
}

/// By kernels of ours.
fn own_forward(cuda: &Cuda, x: &Tensor, w: &Tensor, bias: Option<&Tensor>, z: &ConvDims) -> Result<Tensor> {
    let mut y = Tensor::empty(&x.device(), &z.output_shape(), x.dtype(), Category::Transient)?;
    if thin::serves(z, x.dtype()) {
        thin::forward(cuda, x, w, bias, z, &mut y)?;
        return Ok(y);
    }
    let args = Args::new().input(x).input(w).optional_input(bias).output(&mut y);
    let (grid, shared) = tiles(z.batch * z.oh * z.ow, z.o, x.dtype());
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "conv_forward")?;
    // SAFETY: x, w and y have the shapes of this call, and the bias is [o].
    unsafe { kernel.launch(grid, THREADS, shared, args.fields(&shape(z)))? };
    Ok(y)
}

pub(super) fn backward_input(cuda: &Cuda, dy: &Tensor, w: &Tensor, z: &ConvDims) -> Result<Tensor> {
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

pub(super) fn backward_weight(cuda: &Cuda, x: &Tensor, dy: &Tensor, z: &ConvDims) -> Result<Tensor> {
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
fn splits(cuda: &Cuda, x: &Tensor, dy: &Tensor, z: &ConvDims) -> Result<Tensor> {
    let (pixels, window) = (z.batch * z.oh * z.ow, z.window());
    let width = if x.dtype() == DType::F32 { 64 } else { 128 };
    let (across, down) = (window.div_ceil(width), z.o.div_ceil(64));
    // How the sum is split follows from the shapes, so that it repeats.
    let splits = BLOCKS.div_ceil(across * down);
    let pixels_per_split = pixels.div_ceil(splits).max(MIN_PIXELS).next_multiple_of(32);
    let splits = pixels.div_ceil(pixels_per_split);
    let mut partial = Tensor::empty(&x.device(), &[splits, z.o, window], DType::F32, Category::Workspace)?;
    let args =
        Args::new().input(x).input(dy).output(&mut partial).fields(&shape(z)).i32(pixels_per_split as i32);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, from the head of `conv.cu`.
    #[test]
    fn splits_are_added_up_by_as_many_threads_as_the_kernel_expects() {
        assert_eq!([1, 8, 15, 16, 33, 64, 512].map(|n| total_block(n).1), [1, 1, 1, 2, 4, 8, 8]);
        assert_eq!(total_block(512).0, 32);
    }
}
