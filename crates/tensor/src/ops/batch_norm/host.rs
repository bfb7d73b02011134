//! Batch normalisation on the host: rows in chunks, the sums of a block of channels in registers.

use super::PartialStats;
use crate::cpu::Cpu;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::simd;
use crate::tensor::Tensor;
use crate::with_float;

/// Elements in a chunk of rows.
const CHUNK: usize = 16 << 10;

/// Channels whose sums wait in registers.
const BLOCK: usize = 64;

/// Each chunk's mean and sum of squared distances from it.
pub(super) fn moments(cpu: &Cpu, x: &Tensor) -> Result<PartialStats> {
    let (c, chunk) = (x.width(), rows_of(x));
    let mut numbers = partial_numbers(x, chunk)?;
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>();
        cpu.for_chunks(numbers.slice_mut::<f32>(), 2 * c, |range, numbers| {
            let start = range.start / (2 * c) * chunk * c;
            chunk_moments(cpu.isa(), &x[start..(start + chunk * c).min(x.len())], numbers);
        });
    });
    Ok(PartialStats { numbers, chunk })
}

/// Each chunk's sums of dy and of dy (x - mean).
pub(super) fn gradient_sums(cpu: &Cpu, dy: &Tensor, x: &Tensor, mean: &Tensor) -> Result<PartialStats> {
    let (c, chunk, mean) = (x.width(), rows_of(x), mean.slice::<f32>());
    let mut numbers = partial_numbers(x, chunk)?;
    with_float!(x.dtype(), T => {
        let (dy, x) = (dy.slice::<T>(), x.slice::<T>());
        cpu.for_chunks(numbers.slice_mut::<f32>(), 2 * c, |range, numbers| {
            let start = range.start / (2 * c) * chunk * c;
            let end = (start + chunk * c).min(x.len());
            chunk_gradient_sums(cpu.isa(), &dy[start..end], &x[start..end], mean, numbers);
        });
    });
    Ok(PartialStats { numbers, chunk })
}

/// Normalises by given statistics.
pub(super) fn normalise(
    cpu: &Cpu,
    x: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    mean: &[f32],
    rstd: &[f32],
) -> Result<Tensor> {
    let mut y = x.empty_like(Category::Transient)?;
    // Per channel: y = a (x - mean) + b.
    let a: Vec<f32> = scale.to_f32().iter().zip(rstd).map(|(scale, rstd)| scale * rstd).collect();
    let shift = shift.to_f32();
    with_float!(x.dtype(), T => {
        let values = x.slice::<T>();
        cpu.for_chunks(y.slice_mut::<T>(), rows_of(x) * x.width(), |range, y| {
            apply(cpu.isa(), &values[range], y, &a, mean, &shift);
        });
    });
    Ok(y)
}

/// dx = a dy + b (x - mean) + d, with `line` = [a, b, d] of each channel.
pub(super) fn input_gradient(
    cpu: &Cpu,
    dy: &Tensor,
    x: &Tensor,
    mean: &Tensor,
    line: &[f32],
) -> Result<Tensor> {
    let mean = mean.slice::<f32>();
    let mut dx = x.empty_like(Category::Transient)?;
    with_float!(x.dtype(), T => {
        let (dy, values) = (dy.slice::<T>(), x.slice::<T>());
        cpu.for_chunks(dx.slice_mut::<T>(), rows_of(x) * x.width(), |range, dx| {
            chunk_input_gradient(cpu.isa(), &dy[range.clone()], &values[range], dx, mean, line);
        });
    });
    Ok(dx)
}

/// How many rows make a chunk.
fn rows_of(x: &Tensor) -> usize {
    assert!(x.width() > 0, "a normalised tensor has channels");
    (CHUNK / x.width()).max(1)
}

/// Two numbers a channel for each chunk of so many rows.
fn partial_numbers(x: &Tensor, chunk: usize) -> Result<Tensor> {
    let chunks = x.rows().div_ceil(chunk);
    Tensor::empty(&x.device(), &[chunks, 2, x.width()], DType::F32, Category::Workspace)
}

simd! {
    /// Each channel's mean, then its sum of squared distances from it: `numbers` is [2, c].
    fn chunk_moments[T: Float](x: &[T], numbers: &mut [f32]) {
        let c = numbers.len() / 2;
        let share = 1.0 / (x.len() / c) as f32;
        let (mean, squares) = numbers.split_at_mut(c);
        for c0 in (0..c).step_by(BLOCK) {
            let n = BLOCK.min(c - c0);
            let mut sum = [0.0f32; BLOCK];
            for row in x.chunks_exact(c) {
                for (sum, x) in sum.iter_mut().zip(&row[c0..c0 + n]) {
                    *sum += x.to_f32();
                }
            }
            sum.iter_mut().for_each(|sum| *sum *= share);
            // What the rounded mean is off by shows in the sum of the distances from it.
            let (mut square, mut off) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
            for row in x.chunks_exact(c) {
                let row = &row[c0..c0 + n];
                for k in 0..n {
                    let distance = row[k].to_f32() - sum[k];
                    off[k] += distance;
                    square[k] += distance * distance;
                }
            }
            for k in 0..n {
                sum[k] += off[k] * share;
                square[k] -= off[k] * off[k] * share;
            }
            mean[c0..c0 + n].copy_from_slice(&sum[..n]);
            squares[c0..c0 + n].copy_from_slice(&square[..n]);
        }
    }

    /// Each channel's sum of dy, then of dy (x - mean): `numbers` is [2, c].
    fn chunk_gradient_sums[T: Float](dy: &[T], x: &[T], mean: &[f32], numbers: &mut [f32]) {
        let c = mean.len();
        let (sums, products) = numbers.split_at_mut(c);
        for c0 in (0..c).step_by(BLOCK) {
            let n = BLOCK.min(c - c0);
            let (mut sum, mut product, mut centre) = ([0.0f32; BLOCK], [0.0f32; BLOCK], [0.0f32; BLOCK]);
            centre[..n].copy_from_slice(&mean[c0..c0 + n]);
            for (dy, x) in dy.chunks_exact(c).zip(x.chunks_exact(c)) {
                let (dy, x) = (&dy[c0..c0 + n], &x[c0..c0 + n]);
                for k in 0..n {
                    sum[k] += dy[k].to_f32();
                    product[k] += dy[k].to_f32() * (x[k].to_f32() - centre[k]);
                }
            }
            sums[c0..c0 + n].copy_from_slice(&sum[..n]);
            products[c0..c0 + n].copy_from_slice(&product[..n]);
        }
    }

    /// `y = a (x - mean) + b`, channel by channel.
    fn apply[T: Float](x: &[T], y: &mut [T], a: &[f32], mean: &[f32], b: &[f32]) {
        let c = a.len();
        for (x, y) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)) {
            for ((((y, x), a), mean), b) in y.iter_mut().zip(x).zip(a).zip(mean).zip(b) {
                *y = T::from_f32((x.to_f32() - mean) * a + b);
            }
        }
    }

    /// `dx = a dy + b (x - mean) + d` with `line` = [a, b, d], channel by channel.
    fn chunk_input_gradient[T: Float](dy: &[T], x: &[T], dx: &mut [T], mean: &[f32], line: &[f32]) {
        let c = mean.len();
        let (a, b, d) = (&line[..c], &line[c..2 * c], &line[2 * c..3 * c]);
        for ((dy, x), dx) in dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(dx.chunks_exact_mut(c)) {
            for k in 0..c {
                let slope = b[k] * (x[k].to_f32() - mean[k]);
                dx[k] = T::from_f32(a[k] * dy[k].to_f32() + (slope + d[k]));
            }
        }
    }
}
