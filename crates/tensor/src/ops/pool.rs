//! Pooling of channels-last images: the maximum or the mean of each window, channel by channel.
//!
//! x: [batch, h, w, c]; y: [batch, oh, ow, c]. The gradient of a maximum goes to the first largest element of
//! its window (rows first), that of a mean to all elements alike; where windows overlap the gradients add up.
//! Channels are the fastest axis, so every loop over them is a vector loop. What a window sees past the image is
//! never its maximum and does not count in its mean.

pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::image;
use super::padding::{self, Padding};
use crate::device::Device;
use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::simd;
use crate::tensor::Tensor;
use crate::with_float;

/// The geometry of a pooling window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolParams {
    /// The window's side.
    pub kernel: usize,
    /// Steps of the window, in both directions.
    pub stride: usize,
    /// How far windows reach past each side.
    pub padding: Padding,
}

impl PoolParams {
    /// The windows along a side of `size` pixels with so many more before and behind them.
    fn windows(&self, size: usize, padding: [usize; 2]) -> Vec<PoolWindow> {
        let [before, _] = padding;
        let window = |start: usize| start.saturating_sub(before)..(start + self.kernel - before).min(size);
        let count = padding::count(size, padding, self.kernel, self.stride);
        (0..count).map(|i| PoolWindow::full_size(window(i * self.stride))).collect()
    }

    /// The windows of images of this shape.
    fn grid(&self, shape: &[usize]) -> WindowGrid {
        assert!(2 * self.padding.most() <= self.kernel, "{:?} leaves windows empty", self.padding);
        let shape = image::shape(shape);
        let [rows, columns] = [self.padding.rows(), self.padding.columns()];
        let first = [rows[0], columns[0]];
        let (rows, columns) = (self.windows(shape[1], rows), self.windows(shape[2], columns));
        WindowGrid { shape, rows, columns, first, full_size: [shape[1], shape[2]] }
    }
}

/// Which pixels of a larger image are here, for windows that cover all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// Rows and columns of the larger image.
    pub full_size: [usize; 2],
    /// Its row and column that come first here.
    pub first: [usize; 2],
}

impl Tile {
    /// The full images, of this shape.
    pub fn all(shape: &[usize]) -> Tile {
        let [_, h, w, _] = image::shape(shape);
        Tile { full_size: [h, w], first: [0, 0] }
    }

    /// `size` x `size` windows that cover the larger image: window i is
    /// `floor(i h / size) .. ceil((i + 1) h / size)`, as in PyTorch.
    fn grid(&self, shape: &[usize], size: usize) -> WindowGrid {
        let shape = image::shape(shape);
        let along = |axis: usize| {
            let (full_size, first, here) = (self.full_size[axis], self.first[axis], shape[1 + axis]);
            assert!(first + here <= full_size, "{here} pixels of {full_size} from {first} on");
            let window = |pixels: Range<usize>| {
                let inside = |at: usize| at.clamp(first, first + here) - first;
                PoolWindow { of: pixels.len(), pixels: inside(pixels.start)..inside(pixels.end) }
            };
            cover(full_size, size).into_iter().map(window).collect()
        };
        WindowGrid { shape, rows: along(0), columns: along(1), first: self.first, full_size: self.full_size }
    }
}

/// A window along one side.
#[derive(Debug, Clone, PartialEq)]
struct PoolWindow {
    /// What it sees of x.
    pixels: Range<usize>,
    /// Over how many pixels its mean is taken: more, where x holds a tile of them.
    of: usize,
}

impl PoolWindow {
    fn full_size(pixels: Range<usize>) -> PoolWindow {
        PoolWindow { of: pixels.len(), pixels }
    }
}

/// The largest element of each window; NaN where it has one.
pub fn max_forward(x: &Tensor, pool: PoolParams) -> Result<Tensor> {
    let grid = pool.grid(x.shape());
    match x.device() {
        Device::Cpu(_) => with_float!(x.dtype(), T => fold(x, &grid, max_row::<T>)),
        Device::Cuda(gpu) => cuda::max_forward(&gpu, x, &grid, pool),
    }
}

/// What x has where each window of `like` has its largest element: a maximum whose choice is frozen.
pub fn max_take(x: &Tensor, like: &Tensor, pool: PoolParams) -> Result<Tensor> {
    let grid = pool.grid(x.shape());
    assert_eq!((x.shape(), x.dtype()), (like.shape(), like.dtype()), "an image and one that chooses for it");
    let device = x.device();
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => return cuda::max_take(gpu, x, like, &grid, pool),
    };
    let mut y = Tensor::empty(&device, &grid.output_shape(), x.dtype(), Category::Transient)?;
    let len = grid.output_shape()[1..].iter().product::<usize>().max(1);
    with_float!(x.dtype(), T => {
        let (x, like) = (x.slice::<T>(), like.slice::<T>());
        cpu.for_chunks(y.slice_mut::<T>(), len, |range, y| {
            let n = range.start / len;
            take_max(cpu.isa(), grid.input(x, n), grid.input(like, n), y, &grid);
        });
    });
    Ok(y)
}

/// The gradient of [`max_forward`]'s input, which is needed again to find where the maxima were.
pub fn max_backward(dy: &Tensor, x: &Tensor, pool: PoolParams) -> Result<Tensor> {
    let grid = pool.grid(x.shape());
    assert_eq!(dy.shape(), grid.output_shape(), "the gradient of a pool's output");
    assert_eq!(dy.dtype(), x.dtype(), "an image and its gradient have one type");
    let device = dy.device();
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => return cuda::max_backward(gpu, dy, x, &grid, pool),
    };
    with_float!(dy.dtype(), T => {
        let (dy, x) = (dy.slice::<T>(), x.slice::<T>());
        image::sum(&device, &grid.shape, T::DTYPE, 1, |n, dx| {
            scatter_max(cpu.isa(), grid.output(dy, n), grid.input(x, n), dx, &grid);
        })
    })
}

/// The mean of what each window sees of the image.
pub fn avg_forward(x: &Tensor, pool: PoolParams) -> Result<Tensor> {
    mean(x, &pool.grid(x.shape()), Some(pool))
}

/// The gradient of [`avg_forward`]'s input, whose shape is `input_shape`.
pub fn avg_backward(dy: &Tensor, pool: PoolParams, input_shape: &[usize]) -> Result<Tensor> {
    spread(dy, &pool.grid(input_shape), Some(pool))
}

/// The mean of each image, channel by channel: [batch, c].
pub fn global_avg_forward(x: &Tensor) -> Result<Tensor> {
    let [batch, .., c] = image::shape(x.shape());
    Ok(adaptive_avg_forward(x, 1)?.reshape(&[batch, c]))
}

/// The gradient of [`global_avg_forward`]'s input, whose shape is `input_shape`.
pub fn global_avg_backward(dy: &Tensor, input_shape: &[usize]) -> Result<Tensor> {
    let [batch, .., c] = image::shape(input_shape);
    adaptive_avg_backward(&dy.clone().reshape(&[batch, 1, 1, c]), input_shape)
}

/// The mean of each of `size` x `size` windows that cover the image.
pub fn adaptive_avg_forward(x: &Tensor, size: usize) -> Result<Tensor> {
    adaptive_avg_forward_tile(x, size, Tile::all(x.shape()))
}

/// The gradient of [`adaptive_avg_forward`]'s input, whose shape is `input_shape`.
pub fn adaptive_avg_backward(dy: &Tensor, input_shape: &[usize]) -> Result<Tensor> {
    adaptive_avg_backward_tile(dy, input_shape, Tile::all(input_shape))
}

/// What `x` adds to the means of the larger image that it is a tile of: summed over all tiles, they are those
/// means.
pub fn adaptive_avg_forward_tile(x: &Tensor, size: usize, tile: Tile) -> Result<Tensor> {
    mean(x, &tile.grid(x.shape(), size), None)
}

/// The gradient of a tile, whose shape is `input_shape`, from that of the means.
pub fn adaptive_avg_backward_tile(dy: &Tensor, input_shape: &[usize], tile: Tile) -> Result<Tensor> {
    let [_, size, width, _] = image::shape(dy.shape());
    assert_eq!(size, width, "adaptive windows come in squares");
    spread(dy, &tile.grid(input_shape, size), None)
}

fn cover(side: usize, size: usize) -> Vec<Range<usize>> {
    (0..size).map(|i| i * side / size..((i + 1) * side).div_ceil(size)).collect()
}

/// The windows of a full image: each row range with each column range.
#[derive(Debug)]
struct WindowGrid {
    /// The shape of the input: samples, rows, columns, channels.
    shape: [usize; 4],
    rows: Vec<PoolWindow>,
    columns: Vec<PoolWindow>,
    /// Rows and columns before x's first: of padding, or of the larger image.
    first: [usize; 2],
    /// Rows and columns that the windows cover, where they do.
    full_size: [usize; 2],
}

impl WindowGrid {
    fn output_shape(&self) -> [usize; 4] {
        [self.shape[0], self.rows.len(), self.columns.len(), self.shape[3]]
    }

    /// Whether every pixel lies in one window of `pool`, whose grid this is.
    fn is_tiled_by(&self, pool: PoolParams) -> bool {
        let filled = |windows: &[PoolWindow], pixels: usize| windows.len() * pool.kernel == pixels;
        pool.stride == pool.kernel
            && self.first == [0, 0]
            && filled(&self.rows, self.shape[1])
            && filled(&self.columns, self.shape[2])
    }

    /// Image `n` of the input.
    fn input<'a, T>(&self, x: &'a [T], n: usize) -> &'a [T] {
        let len = self.shape[1..].iter().product::<usize>();
        &x[n * len..(n + 1) * len]
    }

    /// Image `n` of the output.
    fn output<'a, T>(&self, y: &'a [T], n: usize) -> &'a [T] {
        let len = self.output_shape()[1..].iter().product::<usize>();
        &y[n * len..(n + 1) * len]
    }
}

/// Forms each row of output pixels from its image: `row(isa, image, row of windows, output, grid)`.
fn fold<T: Float>(
    x: &Tensor,
    grid: &WindowGrid,
    row: impl Fn(crate::cpu::Isa, &[T], &PoolWindow, &mut [T], &WindowGrid) + Sync + Send,
) -> Result<Tensor> {
    let device = x.device();
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    let mut y = Tensor::empty(&device, &grid.output_shape(), T::DTYPE, Category::Transient)?;
    let [_, oh, ow, c] = grid.output_shape();
    let x = x.slice::<T>();
    cpu.for_chunks(y.slice_mut::<T>(), (oh * ow * c).max(1), |range, y| {
        let image = grid.input(x, range.start / (oh * ow * c));
        for (rows, y) in grid.rows.iter().zip(y.chunks_exact_mut(ow * c)) {
            row(cpu.isa(), image, rows, y, grid);
        }
    });
    Ok(y)
}

/// `pool` is what the grid was made of; none where its windows cover the image.
fn mean(x: &Tensor, grid: &WindowGrid, pool: Option<PoolParams>) -> Result<Tensor> {
    match x.device() {
        Device::Cpu(_) => with_float!(x.dtype(), T => fold(x, grid, mean_row::<T>)),
        Device::Cuda(gpu) => cuda::mean(&gpu, x, grid, pool),
    }
}

/// The gradient of [`mean`]'s input.
fn spread(dy: &Tensor, grid: &WindowGrid, pool: Option<PoolParams>) -> Result<Tensor> {
    assert_eq!(dy.shape(), grid.output_shape(), "the gradient of a pool's output");
    let device = dy.device();
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => return cuda::spread(gpu, dy, grid, pool),
    };
    with_float!(dy.dtype(), T => {
        let dy = dy.slice::<T>();
        image::sum(&device, &grid.shape, T::DTYPE, 1, |n, dx| {
            scatter_mean(cpu.isa(), grid.output(dy, n), dx, grid);
        })
    })
}

/// Channels whose running values wait on the stack.
const BLOCK: usize = 64;

simd! {
    /// One row of windows' maxima.
    fn max_row[T: Float](image: &[T], rows: &PoolWindow, y: &mut [T], grid: &WindowGrid) {
        let [_, _, w, c] = grid.shape;
        let rows = &rows.pixels;
        for (columns, y) in grid.columns.iter().map(|window| &window.pixels).zip(y.chunks_exact_mut(c)) {
            let first = (rows.start * w + columns.start) * c;
            y.copy_from_slice(&image[first..first + c]);
            for i in rows.clone() {
                for j in columns.clone() {
                    for (y, x) in y.iter_mut().zip(&image[(i * w + j) * c..][..c]) {
                        let larger = (x.to_f32() > y.to_f32()) | x.to_f32().is_nan();
                        *y = if larger { *x } else { *y };
                    }
                }
            }
        }
    }

    /// What x has at the first maximum of each window of `like`.
    fn take_max[T: Float](x: &[T], like: &[T], y: &mut [T], grid: &WindowGrid) {
        let [_, _, w, c] = grid.shape;
        let mut windows = grid.rows.iter().flat_map(|r| grid.columns.iter().map(move |s| (r, s)));
        for y in y.chunks_exact_mut(c) {
            let (rows, columns) = windows.next().expect("a window for each output");
            let (rows, columns) = (&rows.pixels, &columns.pixels);
            for (k, y) in y.iter_mut().enumerate() {
                let mut best = (rows.start * w + columns.start) * c + k;
                for i in rows.clone() {
                    for j in columns.clone() {
                        let at = (i * w + j) * c + k;
                        let (new, old) = (like[at].to_f32(), like[best].to_f32());
                        let larger = (new > old) | (new.is_nan() & !old.is_nan());
                        best = if larger { at } else { best };
                    }
                }
                *y = x[best];
            }
        }
    }

    /// Adds the gradient of each window of an image to the first of its maxima.
    fn scatter_max[T: Float](dy: &[T], x: &[T], dx: &mut [f32], grid: &WindowGrid) {
        let [_, _, w, c] = grid.shape;
        let mut windows = grid.rows.iter().flat_map(|r| grid.columns.iter().map(move |s| (r, s)));
        for dy in dy.chunks_exact(c) {
            let (rows, columns) = windows.next().expect("a window for each gradient");
            let (rows, columns) = (&rows.pixels, &columns.pixels);
            for c0 in (0..c).step_by(BLOCK) {
                let n = BLOCK.min(c - c0);
                let (mut best, mut argmax) = ([f32::NEG_INFINITY; BLOCK], [0u32; BLOCK]);
                let start = (rows.start * w + columns.start) * c + c0;
                for k in 0..n {
                    best[k] = x[start + k].to_f32();
                    argmax[k] = start as u32;
                }
                for i in rows.clone() {
                    for j in columns.clone() {
                        let at = (i * w + j) * c + c0;
                        let x = &x[at..at + n];
                        for k in 0..n {
                            let x = x[k].to_f32();
                            // Not `!(x <= best)`: a NaN, once found, stays the maximum.
                            let larger = (x > best[k]) | (x.is_nan() & !best[k].is_nan());
                            best[k] = if larger { x } else { best[k] };
                            argmax[k] = if larger { at as u32 } else { argmax[k] };
                        }
                    }
                }
                for i in rows.clone() {
                    for j in columns.clone() {
                        let at = (i * w + j) * c + c0;
                        let (dx, dy) = (&mut dx[at..at + n], &dy[c0..c0 + n]);
                        for k in 0..n {
                            dx[k] += if argmax[k] == at as u32 { dy[k].to_f32() } else { 0.0 };
                        }
                    }
                }
            }
        }
    }

    /// One row of windows' means.
    fn mean_row[T: Float](image: &[T], rows: &PoolWindow, y: &mut [T], grid: &WindowGrid) {
        let [_, _, w, c] = grid.shape;
        for (columns, y) in grid.columns.iter().zip(y.chunks_exact_mut(c)) {
            let weight = 1.0 / (rows.of * columns.of) as f32;
            let (rows, columns) = (&rows.pixels, &columns.pixels);
            for (block, y) in y.chunks_mut(BLOCK).enumerate() {
                let mut sum = [0.0f32; BLOCK];
                for i in rows.clone() {
                    for j in columns.clone() {
                        let x = &image[(i * w + j) * c + block * BLOCK..][..y.len()];
                        sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x.to_f32());
                    }
                }
                y.iter_mut().zip(sum).for_each(|(y, sum)| *y = T::from_f32(sum * weight));
            }
        }
    }

    /// Adds each window's gradient to all of its elements.
    fn scatter_mean[T: Float](dy: &[T], dx: &mut [f32], grid: &WindowGrid) {
        let [_, _, w, c] = grid.shape;
        let mut windows = grid.rows.iter().flat_map(|r| grid.columns.iter().map(move |s| (r, s)));
        for dy in dy.chunks_exact(c) {
            let (rows, columns) = windows.next().expect("a window for each gradient");
            let weight = 1.0 / (rows.of * columns.of) as f32;
            let (rows, columns) = (&rows.pixels, &columns.pixels);
            for i in rows.clone() {
                for j in columns.clone() {
                    let dx = &mut dx[(i * w + j) * c..][..c];
                    dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx += dy.to_f32() * weight);
                }
            }
        }
    }
}
