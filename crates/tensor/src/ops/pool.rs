//! Pooling of channels-last images: the maximum or the mean of each window, channel by channel.
//!
//! x: [batch, h, w, c]; y: [batch, oh, ow, c]. The gradient of a maximum goes to the first largest element of
//! its window (rows first), that of a mean to all elements alike; where windows overlap the gradients add up.
//! Channels are the fastest axis, so every loop over them is a vector loop. What a window sees past the image is
//! never its maximum and does not count in its mean.
//!
//! A maximum leaves its place, a byte each, and its backward pass reads nothing else: neither x nor y is kept.
//! ReLU behind it is a part of it, since a place can also say that no gradient passes.

pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::chunks::each;
use super::image;
use super::padding::{self, Padding};
use crate::device::Device;
use crate::dtype::{DType, Element, Float};
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
        let window = |start: usize| {
            let pixels = start.saturating_sub(before)..(start + self.kernel - before).min(size);
            PoolWindow { of: pixels.len(), pixels, skipped: before.saturating_sub(start) }
        };
        let count = padding::count(size, padding, self.kernel, self.stride);
        (0..count).map(|i| window(i * self.stride)).collect()
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

    /// The same for maxima.
    fn max_grid(&self, shape: &[usize]) -> WindowGrid {
        assert!(self.kernel <= WIDEST_MAX, "a maximum of {0} x {0} pixels", self.kernel);
        self.grid(shape)
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
                PoolWindow { of: pixels.len(), pixels: inside(pixels.start)..inside(pixels.end), skipped: 0 }
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
    /// How many pixels of padding it begins with.
    skipped: usize,
}

impl PoolWindow {
    /// The pixels that it sees, each with its number in the window.
    fn numbered(&self) -> impl Iterator<Item = (usize, usize)> {
        (self.skipped..).zip(self.pixels.clone())
    }
}

/// The widest window of a maximum: its elements are numbered by a byte, and [`NOWHERE`] is none of them.
const WIDEST_MAX: usize = 15;
/// The place of a maximum that ReLU lets no gradient through to.
const NOWHERE: u8 = u8::MAX;

/// The largest element of each window, or NaN where it has one, with ReLU behind it where that is wanted; and
/// their places, u8 of the same shape: the number of the element in its window, rows first, padding counted.
pub fn max_forward(x: &Tensor, pool: PoolParams, relu: bool) -> Result<(Tensor, Tensor)> {
    let (grid, device) = (pool.max_grid(x.shape()), x.device());
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => return cuda::max_forward(gpu, x, None, pool, relu),
    };
    let shape = grid.output_shape();
    let mut y = Tensor::empty(&device, &shape, x.dtype(), Category::Transient)?;
    let mut places = Tensor::empty(&device, &shape, DType::U8, Category::Transient)?;
    let len = shape[1..].iter().product::<usize>().max(1);
    with_float!(x.dtype(), T => {
        let images = y.slice_mut::<T>().chunks_mut(len).zip(places.slice_mut::<u8>().chunks_mut(len));
        let x = x.slice::<T>();
        each(cpu, images.enumerate(), |(n, (y, places))| {
            max_image(cpu.isa(), grid.input(x, n), y, places, &grid, pool.kernel, relu);
        });
    });
    Ok((y, places))
}

/// What x has at the places of other maxima, made without ReLU: a maximum whose choice is frozen.
pub fn max_take(x: &Tensor, places: &Tensor, pool: PoolParams) -> Result<Tensor> {
    let (grid, device) = (pool.max_grid(x.shape()), x.device());
    let shape = grid.output_shape();
    assert_eq!((places.shape(), places.dtype()), (&shape[..], DType::U8), "the places of maxima");
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => return cuda::max_take(gpu, x, places, &grid, pool),
    };
    let mut y = Tensor::empty(&device, &shape, x.dtype(), Category::Transient)?;
    let len = shape[1..].iter().product::<usize>().max(1);
    with_float!(x.dtype(), T => {
        let (x, places) = (x.slice::<T>(), places.slice::<u8>());
        cpu.for_chunks(y.slice_mut::<T>(), len, |range, y| {
            let image = grid.input(x, range.start / len);
            take_max(cpu.isa(), image, &places[range], y, &grid, pool.kernel);
        });
    });
    Ok(y)
}

/// The gradient of [`max_forward`]'s input, whose shape is `input_shape`, from the places that it gave.
pub fn max_backward(dy: &Tensor, places: &Tensor, pool: PoolParams, input_shape: &[usize]) -> Result<Tensor> {
    let (grid, device) = (pool.max_grid(input_shape), dy.device());
    assert_eq!(dy.shape(), grid.output_shape(), "the gradient of a pool's output");
    assert_eq!((places.shape(), places.dtype()), (dy.shape(), DType::U8), "the places of maxima");
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => return cuda::max_backward(gpu, dy, places, None, pool, input_shape),
    };
    with_float!(dy.dtype(), T => {
        let (dy, places) = (dy.slice::<T>(), places.slice::<u8>());
        image::sum(&device, &grid.shape, T::DTYPE, 1, |n, dx| {
            scatter_max(cpu.isa(), grid.output(dy, n), grid.output(places, n), dx, &grid, pool.kernel);
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

    /// Each window's rows and columns, in the order of the output's pixels.
    fn windows(&self) -> impl Iterator<Item = (&PoolWindow, &PoolWindow)> {
        self.rows.iter().flat_map(|rows| self.columns.iter().map(move |columns| (rows, columns)))
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

/// `pool` is what the grid was made of; none where its windows cover the image.
fn mean(x: &Tensor, grid: &WindowGrid, pool: Option<PoolParams>) -> Result<Tensor> {
    let device = x.device();
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => return cuda::mean(gpu, x, grid, pool),
    };
    let mut y = Tensor::empty(&device, &grid.output_shape(), x.dtype(), Category::Transient)?;
    let len = grid.output_shape()[1..].iter().product::<usize>().max(1);
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>();
        cpu.for_chunks(y.slice_mut::<T>(), len, |range, y| {
            mean_image(cpu.isa(), grid.input(x, range.start / len), y, grid);
        });
    });
    Ok(y)
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
    /// An image's maxima and their places.
    fn max_image[T: Float](
        x: &[T],
        y: &mut [T],
        places: &mut [u8],
        grid: &WindowGrid,
        kernel: usize,
        relu: bool,
    ) {
        let [_, _, w, c] = grid.shape;
        let outputs = y.chunks_exact_mut(c).zip(places.chunks_exact_mut(c));
        for ((rows, columns), (y, places)) in grid.windows().zip(outputs) {
            for c0 in (0..c).step_by(BLOCK) {
                let n = BLOCK.min(c - c0);
                let first = (rows.skipped * kernel + columns.skipped) as u32;
                let (mut best, mut place) = ([f32::NEG_INFINITY; BLOCK], [first; BLOCK]);
                for (u, i) in rows.numbered() {
                    for (v, j) in columns.numbered() {
                        let (x, number) = (&x[(i * w + j) * c + c0..][..n], (u * kernel + v) as u32);
                        for k in 0..n {
                            let x = x[k].to_f32();
                            // As PyTorch has it: the last NaN, and of numbers the first that is largest.
                            let larger = (x > best[k]) | x.is_nan();
                            best[k] = if larger { x } else { best[k] };
                            place[k] = if larger { number } else { place[k] };
                        }
                    }
                }
                for k in 0..n {
                    let (negative, open) = (best[k] < 0.0, best[k] > 0.0);
                    y[c0 + k] = T::from_f32(if relu & negative { 0.0 } else { best[k] });
                    places[c0 + k] = if relu & !open { NOWHERE } else { place[k] as u8 };
                }
            }
        }
    }

    /// What x has at these places.
    fn take_max[T: Float](x: &[T], places: &[u8], y: &mut [T], grid: &WindowGrid, kernel: usize) {
        let [_, _, w, c] = grid.shape;
        let outputs = y.chunks_exact_mut(c).zip(places.chunks_exact(c));
        for ((rows, columns), (y, places)) in grid.windows().zip(outputs) {
            for (k, (y, place)) in y.iter_mut().zip(places).enumerate() {
                let (u, v) = (usize::from(*place) / kernel, usize::from(*place) % kernel);
                let (i, j) = (rows.pixels.start + u - rows.skipped, columns.pixels.start + v - columns.skipped);
                *y = x[(i * w + j) * c + k];
            }
        }
    }

    /// Adds the gradient of each window of an image to the element at its place.
    fn scatter_max[T: Float](dy: &[T], places: &[u8], dx: &mut [f32], grid: &WindowGrid, kernel: usize) {
        let [_, _, w, c] = grid.shape;
        let gradients = dy.chunks_exact(c).zip(places.chunks_exact(c));
        for ((rows, columns), (dy, places)) in grid.windows().zip(gradients) {
            for (u, i) in rows.numbered() {
                for (v, j) in columns.numbered() {
                    let (dx, number) = (&mut dx[(i * w + j) * c..][..c], (u * kernel + v) as u8);
                    for ((dx, dy), place) in dx.iter_mut().zip(dy).zip(places) {
                        *dx += if *place == number { dy.to_f32() } else { 0.0 };
                    }
                }
            }
        }
    }

    /// An image's means.
    fn mean_image[T: Float](x: &[T], y: &mut [T], grid: &WindowGrid) {
        let [_, _, w, c] = grid.shape;
        for ((rows, columns), y) in grid.windows().zip(y.chunks_exact_mut(c)) {
            let weight = 1.0 / (rows.of * columns.of) as f32;
            for (block, y) in y.chunks_mut(BLOCK).enumerate() {
                let mut sum = [0.0f32; BLOCK];
                for i in rows.pixels.clone() {
                    for j in columns.pixels.clone() {
                        let x = &x[(i * w + j) * c + block * BLOCK..][..y.len()];
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
        for ((rows, columns), dy) in grid.windows().zip(dy.chunks_exact(c)) {
            let weight = 1.0 / (rows.of * columns.of) as f32;
            for i in rows.pixels.clone() {
                for j in columns.pixels.clone() {
                    let dx = &mut dx[(i * w + j) * c..][..c];
                    dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx += dy.to_f32() * weight);
                }
            }
        }
    }
}
