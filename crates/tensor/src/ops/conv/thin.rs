//! Convolution of images with few channels on a GPU, where cuDNN does not serve: the first layer of a small
//! network, whose windows have so few elements that the tiles of a product would mostly be padding.

use std::ops::RangeInclusive;

use super::ConvDims;
use super::kernels::{SOURCE, shape};
use crate::cuda::{Args, Build, Cuda};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::lanes::{self, THREADS};
use crate::tensor::Tensor;

/// Sums that a block has: pixels times output channels.
const SUMS: usize = 4096;
/// The most elements under a window.
const WINDOW: usize = 64;
/// Shared memory that every GPU gives a block.
const SHARED: usize = 40 << 10;
/// Pixels that a block of the weight's gradient takes at a time.
const AT_A_TIME: usize = 64;
/// About as many blocks as the sum over pixels is split into: few where there are few pixels, since splits have
/// to be added up, and some for each multiprocessor where there are many.
const BLOCKS: RangeInclusive<usize> = 192..=1056;
/// Pixels that are worth a block beyond the fewest.
const BLOCK_PIXELS: usize = 2048;

/// Whether these kernels take a convolution. In bf16 the tensor cores are faster.
pub(super) fn serves(z: &ConvDims, dtype: DType) -> bool {
    let (o, window) = (z.o, z.window());
    dtype == DType::F32
        && o.is_power_of_two()
        && (4..=256).contains(&o)
        && window <= WINDOW
        && window.div_ceil(4) * (o / 4) <= THREADS as usize
        && forward_shared(z).max(weight_shared(z)) <= SHARED
}

fn forward_shared(z: &ConvDims) -> usize {
    4 * z.window() * (SUMS / z.o + z.o)
}

fn weight_shared(z: &ConvDims) -> usize {
    (4 * AT_A_TIME * (z.window().next_multiple_of(4) + z.o)).max(16 * 4 * THREADS as usize)
}

pub(super) fn forward(
    cuda: &Cuda,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    z: &ConvDims,
    y: &mut Tensor,
) -> Result<()> {
    let grid = lanes::blocks(z.batch * z.oh * z.ow, SUMS / z.o);
    let args = Args::new().input(x).input(w).optional_input(bias).output(y).fields(&shape(z));
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "conv_thin_forward")?;
    // SAFETY: x, w and y have the shapes of this call, the bias is [o], and `serves` has checked what the
    // kernel asks for.
    unsafe { kernel.launch(grid, THREADS, forward_shared(z) as u32, args) }
}

/// The weight's gradient, summed over splits of the pixels: `[splits, o, window]`.
pub(super) fn backward_weight(cuda: &Cuda, x: &Tensor, dy: &Tensor, z: &ConvDims) -> Result<Tensor> {
    let pixels = z.batch * z.oh * z.ow;
    // How the sum is split follows from the shapes, so that it repeats.
    let blocks = (pixels / BLOCK_PIXELS).clamp(*BLOCKS.start(), *BLOCKS.end());
    let pixels_per_split = pixels.div_ceil(blocks).next_multiple_of(AT_A_TIME);
    let splits = pixels.div_ceil(pixels_per_split);
    let mut partial =
        Tensor::empty(&x.device(), &[splits, z.o, z.window()], DType::F32, Category::Workspace)?;
    let args =
        Args::new().input(x).input(dy).output(&mut partial).fields(&shape(z)).i32(pixels_per_split as i32);
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "conv_thin_weight")?;
    // SAFETY: x and dy have the shapes of this call, each split has its o x window numbers, and `serves` has
    // checked the rest.
    unsafe { kernel.launch(splits as u32, THREADS, weight_shared(z) as u32, args)? };
    Ok(partial)
}
