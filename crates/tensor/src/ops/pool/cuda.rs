//! Pooling on a GPU.

use super::{PoolParams, WindowGrid};
use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::cast;
use crate::ops::lanes::{self, ColumnSumLaunch, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = lanes::source("pool.cu", include_str!("../pool.cu"), Build::FLOATS);

/// The most blocks along a grid's second extent.
const MOST: usize = 65535;

/// A batch norm before a pool, which the pool runs on what it reads.
pub(crate) struct PoolNorm<'a> {
    /// Scale and shift.
    pub weights: [&'a Tensor; 2],
    /// Mean and one over the standard deviation.
    pub statistics: [&'a Tensor; 2],
}

/// The backward pass of such a norm: what it read, and the line of its `input_gradient`.
pub(crate) struct PoolNormGradient<'a> {
    pub x: &'a Tensor,
    pub mean: &'a Tensor,
    pub line: &'a Tensor,
}

/// [`super::max_forward`], of what a norm makes of x where there is one.
pub(crate) fn max_forward(
    cuda: &Cuda,
    x: &Tensor,
    norm: Option<PoolNorm<'_>>,
    pool: PoolParams,
    relu: bool,
) -> Result<(Tensor, Tensor)> {
    let grid = pool.max_grid(x.shape());
    let mut y = output(x, &grid)?;
    let mut places = Tensor::empty(&x.device(), y.shape(), DType::U8, Category::Transient)?;
    let weights = norm.as_ref().map(|norm| cast::weights(x.dtype(), norm.weights)).transpose()?;
    let (name, args) = match (&norm, &weights) {
        (Some(PoolNorm { statistics: [mean, rstd], .. }), Some(([scale, shift], wide))) => {
            let args = Args::new().input(x).input(scale).input(shift).i32((*wide).into());
            ("pool_max_forward_normed", args.input(mean).input(rstd))
        }
        _ => ("pool_max_forward", Args::new().input(x)),
    };
    let args = args.output(&mut y).output(&mut places).i32(relu.into()).fields(&size(&grid, Some(pool)));
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), name)?;
    // SAFETY: x has the grid's input shape, y and the places its output shape; what is of the norm is [c],
    // its weights in the type that `wide` says.
    unsafe { kernel.launch(threads(&grid.output_shape(), x.dtype()), THREADS, 0, args)? };
    Ok((y, places))
}

pub(super) fn max_take(
    cuda: &Cuda,
    x: &Tensor,
    places: &Tensor,
    grid: &WindowGrid,
    pool: PoolParams,
) -> Result<Tensor> {
    let mut y = output(x, grid)?;
    let args = Args::new().input(x).input(places).output(&mut y).fields(&size(grid, Some(pool)));
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "pool_max_take")?;
    // SAFETY: x has the grid's input shape, y and the places its output shape.
    unsafe { kernel.launch(threads(&grid.output_shape(), x.dtype()), THREADS, 0, args)? };
    Ok(y)
}

/// [`super::max_backward`], and on through a norm where there is one.
pub(crate) fn max_backward(
    cuda: &Cuda,
    dy: &Tensor,
    places: &Tensor,
    norm: Option<PoolNormGradient<'_>>,
    pool: PoolParams,
    input_shape: &[usize],
) -> Result<Tensor> {
    let grid = pool.max_grid(input_shape);
    let mut dx = Tensor::empty(&dy.device(), &grid.shape, dy.dtype(), Category::Transient)?;
    let mut args = Args::new().input(dy).input(places);
    if let Some(PoolNormGradient { x, mean, line }) = &norm {
        args = args.input(x).input(mean).input(line);
    }
    let args = args.output(&mut dx).fields(&size(&grid, Some(pool)));
    // How many pixels of each side a thread makes.
    let pixels = if matches!(pool, PoolParams { stride: 2, kernel: 2 | 3, .. }) { 2 } else { 1 };
    let name = match (pixels, norm.is_some()) {
        (2, false) => "pool_max_backward_two",
        (2, true) => "pool_max_backward_two_normed",
        (_, false) => "pool_max_backward",
        (_, true) => "pool_max_backward_normed",
    };
    let [batch, h, w, c] = grid.shape;
    let [top, left] = grid.first;
    let squares = |size: usize, before: usize| (before + size).div_ceil(pixels) - before / pixels;
    let blocks = threads(&[batch, squares(h, top), squares(w, left), c], dy.dtype());
    // SAFETY: dx and x have the grid's input shape, dy and the places its output shape; mean is [c], `line`
    // [3, c].
    unsafe { cuda.kernel(&SOURCE, Build::of(dy.dtype()), name)?.launch(blocks, THREADS, 0, args)? };
    Ok(dx)
}

/// Of the gradient of a pool's input, where a norm of x stands before it: each chunk's sums of that and of
/// that times x - mean, `[chunks, 2, c]`.
pub(crate) fn max_gradient_sums(
    cuda: &Cuda,
    dy: &Tensor,
    places: &Tensor,
    [x, mean]: [&Tensor; 2],
    pool: PoolParams,
) -> Result<Tensor> {
    let size = size(&pool.max_grid(x.shape()), Some(pool));
    let ColumnSumLaunch { grid, block, chunk, chunks } = lanes::columns(dy.rows(), dy.width(), dy.dtype());
    let mut sums = Tensor::empty(&dy.device(), &[chunks, 2, dy.width()], DType::F32, Category::Workspace)?;
    let args = Args::new().input(dy).input(places).input(x).input(mean).output(&mut sums);
    let args = args.size(dy.rows()).size(chunk).fields(&size);
    let kernel = cuda.kernel(&SOURCE, Build::of(dy.dtype()), "pool_max_normed_sums")?;
    // SAFETY: x has the grid's input shape, dy and the places its output shape, mean is [c], and each of the
    // chunks has its 2 c numbers.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok(sums)
}

/// `pool`: the windows' geometry; none where they cover the image.
pub(super) fn mean(cuda: &Cuda, x: &Tensor, grid: &WindowGrid, pool: Option<PoolParams>) -> Result<Tensor> {
    let mut y = output(x, grid)?;
    let ([batch, h, w, c], build) = (grid.shape, Build::of(x.dtype()));
    let [_, oh, ow, _] = grid.output_shape();
    if pool.is_none() && oh * ow == 1 && batch <= MOST {
        let ColumnSumLaunch { grid: (across, _), block, .. } = lanes::columns(1, c, x.dtype());
        let args =
            Args::new().input(x).output(&mut y).size(h * w).size(grid.full_size.iter().product()).size(c);
        // SAFETY: x is [batch, h w, c], y [batch, c], and the grid has a row of blocks for each image.
        unsafe {
            cuda.kernel(&SOURCE, build, "pool_global_mean")?.launch((across, batch as u32), block, 0, args)?
        };
        return Ok(y);
    }
    let args = Args::new().input(x).output(&mut y).fields(&size(grid, pool));
    let kernel = cuda.kernel(&SOURCE, build, "pool_mean_forward")?;
    // SAFETY: x and y have the grid's input and output shape.
    unsafe { kernel.launch(threads(&grid.output_shape(), x.dtype()), THREADS, 0, args)? };
    Ok(y)
}

/// The gradient of [`mean`]'s input.
pub(super) fn spread(
    cuda: &Cuda,
    dy: &Tensor,
    grid: &WindowGrid,
    pool: Option<PoolParams>,
) -> Result<Tensor> {
    let mut dx = Tensor::empty(&dy.device(), &grid.shape, dy.dtype(), Category::Transient)?;
    let kernel = cuda.kernel(&SOURCE, Build::of(dy.dtype()), "pool_mean_backward")?;
    let args = Args::new().input(dy).output(&mut dx).fields(&size(grid, pool));
    // SAFETY: dx has the grid's input shape and dy its output shape.
    unsafe { kernel.launch(threads(&grid.shape, dy.dtype()), THREADS, 0, args)? };
    Ok(dx)
}

fn output(x: &Tensor, grid: &WindowGrid) -> Result<Tensor> {
    Tensor::empty(&x.device(), &grid.output_shape(), x.dtype(), Category::Transient)
}

/// The grid of a kernel that gives each thread some channels of a pixel.
fn threads(shape: &[usize; 4], dtype: DType) -> u32 {
    let groups = shape.iter().product::<usize>() / lanes::width(shape[3], dtype);
    assert!(groups.next_multiple_of(256) < 1 << 32, "pooling of {shape:?}: a thread's number has 32 bits");
    lanes::blocks(groups, THREADS as usize)
}

/// The kernels' struct of sizes; a window of 0 stands for windows that cover the image.
fn size(grid: &WindowGrid, pool: Option<PoolParams>) -> [u32; 12] {
    let [batch, h, w, c] = grid.shape;
    let [_, oh, ow, _] = grid.output_shape();
    let (kernel, stride) = pool.map_or((0, 1), |pool| (pool.kernel, pool.stride));
    let ([top, left], [whole_h, whole_w]) = (grid.first, grid.full_size);
    [batch, c, kernel, stride, h, oh, top, whole_h, w, ow, left, whole_w]
        .map(|n| i32::try_from(n).expect("an image's extents have 31 bits") as u32)
}
