//! Pooling of channels-last images: the maximum or the mean of each window, channel by channel.
//!
//! x: [batch, h, w, c]; y: [batch, oh, ow, c]. The gradient of a maximum goes to the first largest element of
//! its window (rows first), that of a mean to all elements alike; where windows overlap the gradients add up.
//! Channels are the fastest axis, so every loop over them is a vector loop.

pub(crate) mod cuda;

use std::ops::Range;

use super::image;
use crate::device::Device;
use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::simd;
use crate::tensor::Tensor;
use crate::with_float;

/// The geometry of a pooling window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// The window's side.
    pub kernel: usize,
    /// Steps of the window, both ways.
    pub stride: usize,
    /// How far windows reach past every side; what they see there is never the maximum.
    pub padding: usize,
}

impl Pool {
    /// How many windows fit along a side of `size` pixels.
    pub fn output_size(&self, size: usize) -> usize {
        let padded = size + 2 * self.padding;
        assert!(padded >= self.kernel, "a window of {} does not fit {size} pixels", self.kernel);
        assert!(2 * self.padding <= self.kernel, "padding {} leaves windows empty", self.padding);
        (padded - self.kernel) / self.stride + 1
    }

    /// The pixels along a side of `size` that each window sees.
    fn windows(&self, size: usize) -> Vec<Range<usize>> {
        let window =
            |start: usize| start.saturating_sub(self.padding)..(start + self.kernel - self.padding).min(size);
        (0..self.output_size(size)).map(|i| window(i * self.stride)).collect()
    }
}

/// The largest element of each window; NaN where it has one.
pub fn max_forward(x: &Tensor, pool: Pool) -> Result<Tensor> {
    let grid = Grid::new(x.shape(), |size| pool.windows(size));
    match x.device() {
        Device::Cpu(_) => with_float!(x.dtype(), T => fold(x, &grid, max_row::<T>)),
        Device::Cuda(card) => cuda::max_forward(&card, x, &grid, pool),
    }
}

/// What x has where each window of `like` has its largest element: a maximum whose choice is held.
pub fn max_take(x: &Tensor, like: &Tensor, pool: Pool) -> Result<Tensor> {
    let grid = Grid::new(x.shape(), |size| pool.windows(size));
    assert_eq!((x.shape(), x.dtype()), (like.shape(), like.dtype()), "an image and one that chooses for it");
    let device = x.device();
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(card) => return cuda::max_take(card, x, like, &grid, pool),
    };
    let mut y = Tensor::empty(&device, &grid.output_shape(), x.dtype(), Category::Activations)?;
    let len = grid.output_shape()[1..].iter().product::<usize>().max(1);
    with_float!(x.dtype(), T => {
        let (x, like) = (x.slice::<T>(), like.slice::<T>());
        cpu.for_pieces(y.slice_mut::<T>(), len, |range, y| {
            let n = range.start / len;
            take_max(cpu.isa(), grid.input(x, n), grid.input(like, n), y, &grid);
        });
    });
    Ok(y)
}

/// The gradient of [`max_forward`]'s input, which is needed again to find where the maxima were.
pub fn max_backward(dy: &Tensor, x: &Tensor, pool: Pool) -> Result<Tensor> {
    let grid = Grid::new(x.shape(), |size| pool.windows(size));
    assert_eq!(dy.shape(), grid.output_shape(), "the gradient of a pool's output");
    assert_eq!(dy.dtype(), x.dtype(), "an image and its gradient have one type");
    let device = dy.device();
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(card) => return cuda::max_backward(card, dy, x, &grid, pool),
    };
    with_float!(dy.dtype(), T => {
        let (dy, x) = (dy.slice::<T>(), x.slice::<T>());
        image::sum(&device, &grid.shape, T::DTYPE, 1, |n, dx| {
            scatter_max(cpu.isa(), grid.output(dy, n), grid.input(x, n), dx, &grid);
        })
    })
}

/// The mean of each window. Padding must be 0.
pub fn avg_forward(x: &Tensor, pool: Pool) -> Result<Tensor> {
    assert_eq!(pool.padding, 0, "a mean over padding");
    mean(x, &Grid::new(x.shape(), |size| pool.windows(size)), Some(pool))
}

/// The gradient of [`avg_forward`]'s input, whose shape is `input_shape`.
pub fn avg_backward(dy: &Tensor, pool: Pool, input_shape: &[usize]) -> Result<Tensor> {
    assert_eq!(pool.padding, 0, "a mean over padding");
    spread(dy, &Grid::new(input_shape, |size| pool.windows(size)), Some(pool))
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

/// The mean of each of `size` x `size` windows that cover the image: window i is
/// `floor(i h / size) .. ceil((i + 1) h / size)`, as in PyTorch.
pub fn adaptive_avg_forward(x: &Tensor, size: usize) -> Result<Tensor> {
    mean(x, &Grid::new(x.shape(), |side| cover(side, size)), None)
}

/// The gradient of [`adaptive_avg_forward`]'s input, whose shape is `input_shape`.
pub fn adaptive_avg_backward(dy: &Tensor, input_shape: &[usize]) -> Result<Tensor> {
    let [_, size, width, _] = image::shape(dy.shape());
    assert_eq!(size, width, "adaptive windows come in squares");
    spread(dy, &Grid::new(input_shape, |side| cover(side, size)), None)
}

fn cover(side: usize, size: usize) -> Vec<Range<usize>> {
    (0..size).map(|i| i * side / size..((i + 1) * side).div_ceil(size)).collect()
}

/// The windows of a whole image: each row range with each column range.
#[derive(Debug)]
struct Grid {
    /// Of the input.
    shape: [usize; 4],
    rows: Vec<Range<usize>>,
    columns: Vec<Range<usize>>,
}

impl Grid {
    fn new(shape: &[usize], windows: impl Fn(usize) -> Vec<Range<usize>>) -> Grid {
        let shape = image::shape(shape);
        Grid { shape, rows: windows(shape[1]), columns: windows(shape[2]) }
    }

    fn output_shape(&self) -> [usize; 4] {
        [self.shape[0], self.rows.len(), self.columns.len(), self.shape[3]]
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
    grid: &Grid,
    row: impl Fn(crate::cpu::Isa, &[T], Range<usize>, &mut [T], &Grid) + Sync + Send,
) -> Result<Tensor> {
    let device = x.device();
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    let mut y = Tensor::empty(&device, &grid.output_shape(), T::DTYPE, Category::Activations)?;
    let [_, oh, ow, c] = grid.output_shape();
    let x = x.slice::<T>();
    cpu.for_pieces(y.slice_mut::<T>(), (oh * ow * c).max(1), |range, y| {
        let image = grid.input(x, range.start / (oh * ow * c));
        for (rows, y) in grid.rows.iter().zip(y.chunks_exact_mut(ow * c)) {
            row(cpu.isa(), image, rows.clone(), y, grid);
        }
    });
    Ok(y)
}

/// `pool` is what the grid was made of; none where its windows cover the image.
fn mean(x: &Tensor, grid: &Grid, pool: Option<Pool>) -> Result<Tensor> {
    match x.device() {
        Device::Cpu(_) => with_float!(x.dtype(), T => fold(x, grid, mean_row::<T>)),
        Device::Cuda(card) => cuda::mean(&card, x, grid, pool),
    }
}

/// The gradient of [`mean`]'s input.
fn spread(dy: &Tensor, grid: &Grid, pool: Option<Pool>) -> Result<Tensor> {
    assert_eq!(dy.shape(), grid.output_shape(), "the gradient of a pool's output");
    let device = dy.device();
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(card) => return cuda::spread(card, dy, grid, pool),
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
    fn max_row[T: Float](image: &[T], rows: Range<usize>, y: &mut [T], grid: &Grid) {
        let [_, _, w, c] = grid.shape;
        for (columns, y) in grid.columns.iter().zip(y.chunks_exact_mut(c)) {
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
    fn take_max[T: Float](x: &[T], like: &[T], y: &mut [T], grid: &Grid) {
        let [_, _, w, c] = grid.shape;
        let mut windows = grid.rows.iter().flat_map(|r| grid.columns.iter().map(move |s| (r, s)));
        for y in y.chunks_exact_mut(c) {
            let (rows, columns) = windows.next().expect("a window for each output");
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
    fn scatter_max[T: Float](dy: &[T], x: &[T], dx: &mut [f32], grid: &Grid) {
        let [_, _, w, c] = grid.shape;
        let mut windows = grid.rows.iter().flat_map(|r| grid.columns.iter().map(move |s| (r, s)));
        for dy in dy.chunks_exact(c) {
            let (rows, columns) = windows.next().expect("a window for each gradient");
            for c0 in (0..c).step_by(BLOCK) {
                let n = BLOCK.min(c - c0);
                let (mut best, mut place) = ([f32::NEG_INFINITY; BLOCK], [0u32; BLOCK]);
                let start = (rows.start * w + columns.start) * c + c0;
                for k in 0..n {
                    best[k] = x[start + k].to_f32();
                    place[k] = start as u32;
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
                            place[k] = if larger { at as u32 } else { place[k] };
                        }
                    }
                }
                for i in rows.clone() {
                    for j in columns.clone() {
                        let at = (i * w + j) * c + c0;
                        let (dx, dy) = (&mut dx[at..at + n], &dy[c0..c0 + n]);
                        for k in 0..n {
                            dx[k] += if place[k] == at as u32 { dy[k].to_f32() } else { 0.0 };
                        }
                    }
                }
            }
        }
    }

    /// One row of windows' means.
    fn mean_row[T: Float](image: &[T], rows: Range<usize>, y: &mut [T], grid: &Grid) {
        let [_, _, w, c] = grid.shape;
        for (columns, y) in grid.columns.iter().zip(y.chunks_exact_mut(c)) {
            let share = 1.0 / (rows.len() * columns.len()) as f32;
            for (block, y) in y.chunks_mut(BLOCK).enumerate() {
                let mut sum = [0.0f32; BLOCK];
                for i in rows.clone() {
                    for j in columns.clone() {
                        let x = &image[(i * w + j) * c + block * BLOCK..][..y.len()];
                        sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x.to_f32());
                    }
                }
                y.iter_mut().zip(sum).for_each(|(y, sum)| *y = T::from_f32(sum * share));
            }
        }
    }

    /// Adds each window's gradient to all of its elements.
    fn scatter_mean[T: Float](dy: &[T], dx: &mut [f32], grid: &Grid) {
        let [_, _, w, c] = grid.shape;
        let mut windows = grid.rows.iter().flat_map(|r| grid.columns.iter().map(move |s| (r, s)));
        for dy in dy.chunks_exact(c) {
            let (rows, columns) = windows.next().expect("a window for each gradient");
            let share = 1.0 / (rows.len() * columns.len()) as f32;
            for i in rows.clone() {
                for j in columns.clone() {
                    let dx = &mut dx[(i * w + j) * c..][..c];
                    dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx += dy.to_f32() * share);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{assert_close, check, dot, gradient, tensor, values, wide};

    /// For every output of every image, its window's elements, rows first, as indices of x.
    fn windows(grid: &Grid) -> Vec<Vec<usize>> {
        let [batch, h, w, c] = grid.shape;
        let mut all = Vec::new();
        for n in 0..batch {
            for rows in &grid.rows {
                for columns in &grid.columns {
                    for k in 0..c {
                        let row = |i| columns.clone().map(move |j| ((n * h + i) * w + j) * c + k);
                        all.push(rows.clone().flat_map(row).collect());
                    }
                }
            }
        }
        all
    }

    fn plain_max(x: &[f64], grid: &Grid) -> Vec<f64> {
        windows(grid).iter().map(|w| w.iter().map(|&i| x[i]).fold(f64::NEG_INFINITY, f64::max)).collect()
    }

    fn plain_mean(x: &[f64], grid: &Grid) -> Vec<f64> {
        windows(grid).iter().map(|w| w.iter().map(|&i| x[i]).sum::<f64>() / w.len() as f64).collect()
    }

    fn plain_max_take(x: &[f64], like: &[f64], grid: &Grid) -> Vec<f64> {
        let first = |w: &Vec<usize>| w.iter().copied().reduce(|a, b| if like[b] > like[a] { b } else { a });
        windows(grid).iter().map(|window| x[first(window).unwrap()]).collect()
    }

    fn plain_max_backward(dy: &[f64], x: &[f64], grid: &Grid) -> Vec<f64> {
        let mut dx = vec![0.0; x.len()];
        for (window, dy) in windows(grid).iter().zip(dy) {
            dx[window.iter().copied().reduce(|a, b| if x[b] > x[a] { b } else { a }).unwrap()] += dy;
        }
        dx
    }

    fn plain_mean_backward(dy: &[f64], grid: &Grid) -> Vec<f64> {
        let mut dx = vec![0.0; grid.shape.iter().product()];
        for (window, dy) in windows(grid).iter().zip(dy) {
            window.iter().for_each(|&i| dx[i] += dy / window.len() as f64);
        }
        dx
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn windows_of_any_geometry_agree_with_plain_loops(
            (kernel, stride, reach) in (1usize..5, 1usize..5, 0usize..3),
            (batch, h, w, c) in (1usize..4, 4usize..11, 4usize..11, 1usize..150),
            seed in 0u64..1000,
        ) {
            let pool = Pool { kernel, stride, padding: reach.min(kernel / 2) };
            let flat = Pool { padding: 0, ..pool };
            let shape = [batch, h, w, c];
            // Few distinct values, so that windows have several maxima and the first one must be found.
            let x: Vec<f32> = values(seed, shape.iter().product(), 2.0).iter().map(|x| x.round()).collect();
            let grid = Grid::new(&shape, |size| pool.windows(size));
            let flat_grid = Grid::new(&shape, |size| flat.windows(size));
            let dy = values(seed + 1, grid.output_shape().iter().product(), 1.0);
            let other: Vec<f32> = values(seed + 3, x.len(), 1.0);
            let flat_dy = values(seed + 2, flat_grid.output_shape().iter().product(), 1.0);
            let x64 = wide(&x);
            let expected = [
                plain_max(&x64, &grid),
                plain_max_take(&wide(&other), &x64, &grid),
                plain_max_backward(&wide(&dy), &x64, &grid),
                plain_mean(&x64, &flat_grid),
                plain_mean_backward(&wide(&flat_dy), &flat_grid),
            ];
            check(&expected, |device, dtype| {
                let x = tensor(device, dtype, &shape, &x);
                let dy = tensor(device, dtype, &grid.output_shape(), &dy);
                let flat_dy = tensor(device, dtype, &flat_grid.output_shape(), &flat_dy);
                vec![
                    max_forward(&x, pool).unwrap(),
                    max_take(&tensor(device, dtype, &shape, &other), &x, pool).unwrap(),
                    max_backward(&dy, &x, pool).unwrap(),
                    avg_forward(&x, flat).unwrap(),
                    avg_backward(&flat_dy, flat, &shape).unwrap(),
                ]
            });
        }

        #[test]
        fn covering_windows_agree_with_plain_loops(
            (batch, h, w, c) in (1usize..4, 1usize..11, 1usize..11, 1usize..90),
            size in 1usize..6,
        ) {
            let shape = [batch, h, w, c];
            let x = values(5, shape.iter().product(), 1.0);
            let (grid, whole) = (Grid::new(&shape, |side| cover(side, size)), Grid::new(&shape, |side| std::iter::once(0..side).collect()));
            let dy = values(6, batch * size * size * c, 1.0);
            let whole_dy = values(7, batch * c, 1.0);
            let expected = [
                plain_mean(&wide(&x), &grid),
                plain_mean_backward(&wide(&dy), &grid),
                plain_mean(&wide(&x), &whole),
                plain_mean_backward(&wide(&whole_dy), &whole),
            ];
            check(&expected, |device, dtype| {
                let x = tensor(device, dtype, &shape, &x);
                let dy = tensor(device, dtype, &grid.output_shape(), &dy);
                let whole_dy = tensor(device, dtype, &[batch, c], &whole_dy);
                vec![
                    adaptive_avg_forward(&x, size).unwrap(),
                    adaptive_avg_backward(&dy, &shape).unwrap(),
                    global_avg_forward(&x).unwrap(),
                    global_avg_backward(&whole_dy, &shape).unwrap(),
                ]
            });
        }
    }

    #[test]
    fn the_plain_backwards_are_derivatives_of_the_plain_forwards() {
        let pool = Pool { kernel: 3, stride: 2, padding: 1 };
        let grid = Grid::new(&[1, 5, 6, 2], |size| pool.windows(size));
        let x = wide(&values(1, 60, 1.0));
        let dy = wide(&values(2, grid.output_shape().iter().product(), 1.0));
        let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<_>>();
        let numeric = gradient(&x, |x| dot(&plain_max(x, &grid), &dy));
        assert_close(&narrow(plain_max_backward(&dy, &x, &grid)), &numeric, 1e-6);
        let numeric = gradient(&x, |x| dot(&plain_mean(x, &grid), &dy));
        assert_close(&narrow(plain_mean_backward(&dy, &grid)), &numeric, 1e-6);
    }

    #[test]
    fn adaptive_windows_follow_pytorch() {
        assert_eq!(cover(7, 3), [0..3, 2..5, 4..7]);
        assert_eq!(cover(2, 4), [0..1, 0..1, 1..2, 1..2]);
    }
}
