//! Batch normalisation: every channel gets mean 0 and variance 1 over the batch, then a scale and a shift.
//!
//! ```text
//! xhat = (x - mean) rstd,   rstd = 1 / sqrt(variance + eps),   y = xhat scale + shift
//! dx = scale rstd (dy - (dshift + xhat dscale) / n),   dscale = sum dy xhat,   dshift = sum dy
//! ```
//! x: [.., c], n rows of c channels; mean, rstd, variance: f32 `[c]`; scale, shift: `[c]`. The variance is the
//! biased one (divided by n), which normalises; a running estimate wants it times n / (n - 1).
//!
//! Statistics are taken over pieces of rows, in two passes while a piece is in the cache, and joined in f64 by
//! the rule of Chan, Golub and LeVeque (1979): no cancellation, and the same bits on any number of threads.
//!
//! Where x holds only some of the rows of a batch ([`forward_part`], [`backward_part`]), the caller adds up a few
//! numbers a channel over all that hold the others: `sum x` and `sum x^2` on the way forward, `sum dy` and
//! `sum dy (x - mean)` on the way back. They travel in f64, in which the squares of f32 numbers leave room enough.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::simd;
use crate::tensor::Tensor;
use crate::with_float;

/// Elements in a piece of rows.
const PIECE: usize = 16 << 10;

/// Channels whose sums wait in registers.
const BLOCK: usize = 64;

/// Normalises by the batch's own statistics: `(y, mean, rstd)`.
pub fn forward(x: &Tensor, scale: &Tensor, shift: &Tensor, eps: f32) -> Result<(Tensor, Tensor, Tensor)> {
    check_channels(x.width(), [(scale, "scale"), (shift, "shift")]);
    if let Device::Cuda(card) = x.device() {
        return cuda::forward(&card, x, scale, shift, eps);
    }
    let moments = Moments::of(x)?;
    let (mean, rstd) = moments.statistics(&x.device(), eps)?;
    let y = normalise_on_host(x, scale, shift, mean.slice(), rstd.slice())?;
    Ok((y, mean, rstd))
}

/// The same by the statistics of all rows of which x holds some: `(y, mean, rstd, rows)`. `everywhere` adds numbers up
/// over all that hold a part, and all must call this.
pub fn forward_part<E: From<Error>>(
    x: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    eps: f32,
    everywhere: impl FnOnce(Vec<f64>) -> Result<Vec<f64>, E>,
) -> Result<(Tensor, Tensor, Tensor, usize), E> {
    check_channels(x.width(), [(scale, "scale"), (shift, "shift")]);
    let sums = everywhere(Moments::of(x)?.to_sums())?;
    let moments = Moments::from_sums(&sums);
    let (mean, rstd) = moments.statistics(&x.device(), eps)?;
    let y = match x.device() {
        Device::Cpu(_) => normalise_on_host(x, scale, shift, mean.slice(), rstd.slice())?,
        Device::Cuda(card) => cuda::normalise(&card, x, scale, shift, &mean, &rstd)?,
    };
    Ok((y, mean, rstd, moments.rows as usize))
}

/// What is known of some rows: how many they are, each channel's mean, and its sum of squared distances from it.
struct Moments {
    rows: f64,
    mean: Vec<f64>,
    squares: Vec<f64>,
}

impl Moments {
    /// Those of x. A card is waited for, as its pieces are joined on the host.
    fn of(x: &Tensor) -> Result<Moments> {
        let (device, c) = (x.device(), x.width());
        let (parts, rows) = match &device {
            Device::Cpu(cpu) => {
                let rows = rows_of(x);
                let pieces = x.rows().div_ceil(rows);
                let mut parts = Tensor::empty(&device, &[pieces, 2, c], DType::F32, Category::Workspace)?;
                with_float!(x.dtype(), T => {
                    let x = x.slice::<T>();
                    cpu.for_pieces(parts.slice_mut::<f32>(), 2 * c, |range, part| {
                        let start = range.start / (2 * c) * rows * c;
                        moments(cpu.isa(), &x[start..(start + rows * c).min(x.len())], part);
                    });
                });
                (parts, rows)
            }
            Device::Cuda(card) => {
                let cuda::Partial { numbers, piece } = cuda::moments(card, x)?;
                (numbers, piece)
            }
        };
        let (mut n, mut centre, mut squares) = (0.0f64, vec![0.0f64; c], vec![0.0f64; c]);
        for part in parts.read_f32()?.chunks_exact(2 * c) {
            let more = (rows as f64).min(x.rows() as f64 - n);
            let (share, spread) = (more / (n + more), n * more / (n + more));
            n += more;
            for k in 0..c {
                let delta = f64::from(part[k]) - centre[k];
                centre[k] += delta * share;
                squares[k] += f64::from(part[c + k]) + delta * delta * spread;
            }
        }
        Ok(Moments { rows: n, mean: centre, squares })
    }

    /// As numbers that add up over parts: each channel's sum, its sum of squares, and the rows.
    fn to_sums(&self) -> Vec<f64> {
        let n = self.rows;
        let sums = self.mean.iter().map(|mean| n * mean);
        let squares = self.squares.iter().zip(&self.mean).map(|(squares, mean)| squares + n * mean * mean);
        sums.chain(squares).chain([n]).collect()
    }

    fn from_sums(sums: &[f64]) -> Moments {
        let c = sums.len() / 2;
        let rows = sums[2 * c];
        let mean: Vec<f64> = sums[..c].iter().map(|sum| sum / rows.max(1.0)).collect();
        let around = |(square, mean): (&f64, &f64)| (square - rows * mean * mean).max(0.0);
        let squares = sums[c..2 * c].iter().zip(&mean).map(around).collect();
        Moments { rows, mean, squares }
    }

    /// The mean, and one over the deviation, as the kernels want them.
    fn statistics(&self, device: &Device, eps: f32) -> Result<(Tensor, Tensor)> {
        let mean: Vec<f32> = self.mean.iter().map(|mean| *mean as f32).collect();
        let rstd = |squares: &f64| (1.0 / (squares / self.rows.max(1.0) + f64::from(eps)).sqrt()) as f32;
        let rstd: Vec<f32> = self.squares.iter().map(rstd).collect();
        let tensor = |data: &[f32]| Tensor::from_slice(device, &[data.len()], data, Category::Activations);
        Ok((tensor(&mean)?, tensor(&rstd)?))
    }
}

/// Normalises by given statistics.
pub fn evaluate(
    x: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    mean: &Tensor,
    variance: &Tensor,
    eps: f32,
) -> Result<Tensor> {
    check_channels(x.width(), [(scale, "scale"), (shift, "shift"), (mean, "mean"), (variance, "variance")]);
    if let Device::Cuda(card) = x.device() {
        return cuda::evaluate(&card, x, scale, shift, mean, variance, eps);
    }
    let rstd: Vec<f32> = variance.slice::<f32>().iter().map(|v| 1.0 / (v + eps).sqrt()).collect();
    normalise_on_host(x, scale, shift, mean.slice(), &rstd)
}

/// The gradients `(dx, dscale, dshift)` of [`forward`].
pub fn backward(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    check_gradient(dy, x, scale, mean, rstd);
    if let Device::Cuda(card) = x.device() {
        return cuda::backward(&card, dy, x, scale, mean, rstd);
    }
    let sums = sums_of(dy, x, mean)?;
    let dx = through_statistics(dy, x, scale, mean, rstd, &sums)?;
    let (dscale, dshift) = scale_and_shift(scale, rstd, &sums)?;
    Ok((dx, dscale, dshift))
}

/// The gradients of [`forward_part`]: those of scale and shift are this part's own, and add up over all parts.
pub fn backward_part<E: From<Error>>(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
    everywhere: impl FnOnce(Vec<f64>) -> Result<Vec<f64>, E>,
) -> Result<(Tensor, Tensor, Tensor), E> {
    check_gradient(dy, x, scale, mean, rstd);
    let own = sums_of(dy, x, mean)?;
    let all = everywhere(own.clone())?;
    let dx = through_statistics(dy, x, scale, mean, rstd, &all)?;
    let (dscale, dshift) = scale_and_shift(scale, rstd, &own)?;
    Ok((dx, dscale, dshift))
}

#[track_caller]
fn check_gradient(dy: &Tensor, x: &Tensor, scale: &Tensor, mean: &Tensor, rstd: &Tensor) {
    assert_eq!(dy.shape(), x.shape(), "the gradient of a normalised tensor");
    assert_eq!(dy.dtype(), x.dtype(), "a tensor and its gradient have one type");
    check_channels(x.width(), [(scale, "scale"), (mean, "mean"), (rstd, "deviation")]);
}

/// Each channel's sum of dy, its sum of dy (x - mean), and the rows: numbers that add up over parts.
fn sums_of(dy: &Tensor, x: &Tensor, mean: &Tensor) -> Result<Vec<f64>> {
    let (device, c) = (x.device(), x.width());
    let parts = match &device {
        Device::Cpu(cpu) => {
            let (mean, rows) = (mean.slice::<f32>(), rows_of(x));
            let pieces = x.rows().div_ceil(rows);
            let mut parts = Tensor::empty(&device, &[pieces, 2, c], DType::F32, Category::Workspace)?;
            with_float!(x.dtype(), T => {
                let (dy, x) = (dy.slice::<T>(), x.slice::<T>());
                cpu.for_pieces(parts.slice_mut::<f32>(), 2 * c, |range, part| {
                    let start = range.start / (2 * c) * rows * c;
                    let end = (start + rows * c).min(x.len());
                    gradient_sums(cpu.isa(), &dy[start..end], &x[start..end], mean, part);
                });
            });
            parts
        }
        Device::Cuda(card) => cuda::gradient_sums(card, dy, x, mean)?.numbers,
    };
    let mut sums = vec![0.0f64; 2 * c];
    for part in parts.read_f32()?.chunks_exact(2 * c) {
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += f64::from(*part));
    }
    sums.push(x.rows() as f64);
    Ok(sums)
}

/// dx, from the sums over all rows of the batch.
fn through_statistics(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
    sums: &[f64],
) -> Result<Tensor> {
    let (device, c) = (x.device(), x.width());
    let (rstd, n) = (rstd.read_f32()?, sums[2 * c].max(1.0));
    // Per channel: dx = a dy + b (x - mean) + d.
    let mut line = vec![0.0f32; 3 * c];
    for (k, scale) in scale.read_f32()?.into_iter().enumerate() {
        let rstd = f64::from(rstd[k]);
        let a = f64::from(scale) * rstd;
        line[k] = a as f32;
        line[c + k] = (-a * rstd * (sums[c + k] * rstd) / n) as f32;
        line[2 * c + k] = (-a * sums[k] / n) as f32;
    }
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(card) => {
            let line = Tensor::from_slice(&device, &[3, c], &line, Category::Workspace)?;
            return cuda::input_gradient(card, dy, x, mean, &line);
        }
    };
    let (mean, rows) = (mean.slice::<f32>(), rows_of(x));
    let mut dx = x.empty_like(Category::Activations)?;
    with_float!(x.dtype(), T => {
        let (dy, x) = (dy.slice::<T>(), x.slice::<T>());
        cpu.for_pieces(dx.slice_mut::<T>(), rows * c, |range, dx| {
            input_gradient(cpu.isa(), &dy[range.clone()], &x[range], dx, mean, &line);
        });
    });
    Ok(dx)
}

/// `(dscale, dshift)` from the sums over some rows.
fn scale_and_shift(scale: &Tensor, rstd: &Tensor, sums: &[f64]) -> Result<(Tensor, Tensor)> {
    let c = scale.len();
    let products = sums[c..2 * c].iter().zip(rstd.read_f32()?);
    let dscale: Vec<f32> = products.map(|(sum, rstd)| (sum * f64::from(rstd)) as f32).collect();
    let dshift: Vec<f32> = sums[..c].iter().map(|sum| *sum as f32).collect();
    let gradient =
        |sums: &[f32]| Tensor::from_f32(&scale.device(), &[c], scale.dtype(), sums, Category::Workspace);
    Ok((gradient(&dscale)?, gradient(&dshift)?))
}

/// Folds a batch's statistics, taken over `count` rows, into running ones with PyTorch's momentum of 0.1; the
/// variance is the unbiased one, as there. All are f32 `[c]`, and `eps` is that of [`forward`].
pub fn fold(
    mean: &Tensor,
    rstd: &Tensor,
    count: usize,
    eps: f32,
    running_mean: &mut Tensor,
    running_variance: &mut Tensor,
) -> Result<()> {
    const MOMENTUM: f32 = 0.1;
    let statistics = [(rstd, "deviation"), (&*running_mean, "mean"), (&*running_variance, "variance")];
    check_channels(mean.len(), statistics);
    let unbias = count as f32 / (count.max(2) - 1) as f32;
    if let Device::Cuda(card) = mean.device() {
        return cuda::fold(&card, mean, rstd, unbias, eps, MOMENTUM, running_mean, running_variance);
    }
    let batch = mean.slice::<f32>().iter().zip(rstd.slice::<f32>());
    let running = running_mean.slice_mut::<f32>().iter_mut().zip(running_variance.slice_mut::<f32>());
    for ((mean, rstd), (running_mean, running_variance)) in batch.zip(running) {
        let variance = (1.0 / (rstd * rstd) - eps).max(0.0) * unbias;
        *running_mean += MOMENTUM * (mean - *running_mean);
        *running_variance += MOMENTUM * (variance - *running_variance);
    }
    Ok(())
}

/// That each tensor has a number for each channel.
#[track_caller]
fn check_channels<const N: usize>(c: usize, tensors: [(&Tensor, &str); N]) {
    for (tensor, what) in tensors {
        assert_eq!(tensor.len(), c, "a channel's {what}");
    }
}

/// How many rows make a piece.
fn rows_of(x: &Tensor) -> usize {
    assert!(x.width() > 0, "a normalised tensor has channels");
    (PIECE / x.width()).max(1)
}

fn normalise_on_host(
    x: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    mean: &[f32],
    rstd: &[f32],
) -> Result<Tensor> {
    let (device, c) = (x.device(), x.width());
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    let mut y = x.empty_like(Category::Activations)?;
    // Per channel: y = a x + b.
    let a: Vec<f32> = scale.to_f32().iter().zip(rstd).map(|(scale, rstd)| scale * rstd).collect();
    let shift = shift.to_f32();
    let rows = rows_of(x);
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>();
        cpu.for_pieces(y.slice_mut::<T>(), rows * c, |range, y| {
            apply(cpu.isa(), &x[range], y, &a, mean, &shift);
        });
    });
    Ok(y)
}

simd! {
    /// Each channel's mean, then its sum of squared distances from it: `part` is [2, c].
    fn moments[T: Float](x: &[T], part: &mut [f32]) {
        let c = part.len() / 2;
        let share = 1.0 / (x.len() / c) as f32;
        let (mean, squares) = part.split_at_mut(c);
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

    /// Each channel's sum of dy, then of dy (x - mean): `part` is [2, c].
    fn gradient_sums[T: Float](dy: &[T], x: &[T], mean: &[f32], part: &mut [f32]) {
        let c = mean.len();
        let (sums, products) = part.split_at_mut(c);
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
    fn input_gradient[T: Float](dy: &[T], x: &[T], dx: &mut [T], mean: &[f32], line: &[f32]) {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{assert_close, check, devices, dot, gradient, tensor, values, wide};

    const EPS: f32 = 1e-5;

    /// `(y, mean, rstd)` by the textbook.
    fn plain_forward(x: &[f64], scale: &[f64], shift: &[f64]) -> [Vec<f64>; 3] {
        let c = scale.len();
        let n = (x.len() / c) as f64;
        let column = |k: usize| x.iter().skip(k).step_by(c);
        let mean: Vec<f64> = (0..c).map(|k| column(k).sum::<f64>() / n).collect();
        let variance = |k: usize| column(k).map(|x| (x - mean[k]).powi(2)).sum::<f64>() / n;
        let rstd: Vec<f64> = (0..c).map(|k| 1.0 / (variance(k) + f64::from(EPS)).sqrt()).collect();
        let y = |(i, x): (usize, &f64)| (x - mean[i % c]) * rstd[i % c] * scale[i % c] + shift[i % c];
        [x.iter().enumerate().map(y).collect(), mean, rstd]
    }

    /// `(dx, dscale, dshift)` by the formula above.
    fn plain_backward(dy: &[f64], x: &[f64], scale: &[f64]) -> [Vec<f64>; 3] {
        let c = scale.len();
        let n = (x.len() / c) as f64;
        let (mut dscale, mut dshift) = (vec![0.0; c], vec![0.0; c]);
        let [xhat, _, rstd] = plain_forward(x, &vec![1.0; c], &vec![0.0; c]);
        for (i, dy) in dy.iter().enumerate() {
            dscale[i % c] += dy * xhat[i];
            dshift[i % c] += dy;
        }
        let dx = |(i, dy): (usize, &f64)| {
            let k = i % c;
            scale[k] * rstd[k] * (dy - (dshift[k] + xhat[i] * dscale[k]) / n)
        };
        [dy.iter().enumerate().map(dx).collect(), dscale, dshift]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn both_passes_agree_with_the_textbook(
            (batch, h, w, c) in (1usize..9, 1usize..20, 2usize..20, 1usize..200),
            seed in 0u64..1000,
        ) {
            let shape = [batch, h, w, c];
            let x = values(seed, shape.iter().product(), 1.0);
            let dy = values(seed + 1, x.len(), 1.0);
            let (scale, shift) = (values(seed + 2, c, 1.0), values(seed + 3, c, 1.0));
            let (scale64, shift64) = (wide(&scale), wide(&shift));
            let [y, mean, rstd] = plain_forward(&wide(&x), &scale64, &shift64);
            let [dx, dscale, dshift] = plain_backward(&wide(&dy), &wide(&x), &scale64);
            let expected = [y.clone(), mean, rstd.clone(), y, dx, dscale, dshift];
            check(&expected, |device, dtype| {
                let x = tensor(device, dtype, &shape, &x);
                let dy = tensor(device, dtype, &shape, &dy);
                let (scale, shift) = (tensor(device, dtype, &[c], &scale), tensor(device, dtype, &[c], &shift));
                let (y, mean, rstd) = forward(&x, &scale, &shift, EPS).unwrap();
                let variance = rstd.to_f32().iter().map(|r| 1.0 / (r * r) - EPS).collect::<Vec<_>>();
                let variance = tensor(device, DType::F32, &[c], &variance);
                let again = evaluate(&x, &scale, &shift, &mean, &variance, EPS).unwrap();
                let (dx, dscale, dshift) = backward(&dy, &x, &scale, &mean, &rstd).unwrap();
                vec![y, mean, rstd, again, dx, dscale, dshift]
            });
        }
    }

    /// Parts of a batch that add up their sums give what the whole batch gives.
    #[test]
    fn parts_of_a_batch_are_normalised_as_the_whole() {
        let (rows, c) = (700, 70);
        let x: Vec<f32> = values(1, rows * c, 1.0).iter().map(|x| x + 3.0).collect();
        let dy = values(2, rows * c, 1.0);
        let [scale, shift] = [3, 4].map(|seed| values(seed, c, 1.0));
        let on = |[device, ..]: &[Device; 3]| [DType::F32, DType::Bf16].map(|dtype| (device.clone(), dtype));
        for (device, dtype) in devices().iter().flat_map(on) {
            let channels = |data: &[f32]| tensor(&device, dtype, &[c], data);
            let (scale, shift) = (channels(&scale), channels(&shift));
            let part = |data: &[f32], rows: std::ops::Range<usize>| {
                tensor(&device, dtype, &[rows.len(), c], &data[rows.start * c..rows.end * c])
            };
            // Uneven parts, as a cut image has them; each adds its numbers to what the others brought.
            let cuts = [0..1, 1..300, 300..rows];
            let add = |sums: Vec<Vec<f64>>| -> Vec<f64> {
                (0..2 * c + 1).map(|k| sums.iter().map(|sums| sums[k]).sum()).collect()
            };
            let all =
                add(cuts.iter().map(|at| Moments::of(&part(&x, at.clone())).unwrap().to_sums()).collect());
            let whole = part(&x, 0..rows);
            let (y, mean, rstd) = forward(&whole, &scale, &shift, EPS).unwrap();
            let (dx, dscale, dshift) = backward(&part(&dy, 0..rows), &whole, &scale, &mean, &rstd).unwrap();
            let brought = |at: &std::ops::Range<usize>| {
                sums_of(&part(&dy, at.clone()), &part(&x, at.clone()), &mean).unwrap()
            };
            let back = add(cuts.iter().map(brought).collect());

            let (mut ys, mut dxs, mut dscales, mut dshifts) = (vec![], vec![], vec![0.0; c], vec![0.0; c]);
            for at in cuts {
                let (x, dy) = (part(&x, at.clone()), part(&dy, at.clone()));
                let mut seen = 0;
                let (y, m, r, n) = forward_part::<Error>(&x, &scale, &shift, EPS, |own| {
                    seen = own[2 * c] as usize;
                    Ok(all.clone())
                })
                .unwrap();
                assert_eq!((seen, n), (at.len(), rows));
                assert_close(&m.to_f32(), &wide(&mean.to_f32()), 1e-6);
                assert_close(&r.to_f32(), &wide(&rstd.to_f32()), 1e-6);
                let (dx, dscale, dshift) =
                    backward_part::<Error>(&dy, &x, &scale, &m, &r, |_| Ok(back.clone())).unwrap();
                ys.extend(y.to_f32());
                dxs.extend(dx.to_f32());
                dscales.iter_mut().zip(dscale.to_f32()).for_each(|(sum, part)| *sum += part);
                dshifts.iter_mut().zip(dshift.to_f32()).for_each(|(sum, part)| *sum += part);
            }
            let tolerance = if dtype == DType::F32 { 2e-6 } else { 1e-2 };
            assert_close(&ys, &wide(&y.to_f32()), tolerance);
            assert_close(&dxs, &wide(&dx.to_f32()), tolerance);
            assert_close(&dscales, &wide(&dscale.to_f32()), tolerance);
            assert_close(&dshifts, &wide(&dshift.to_f32()), tolerance);
        }
    }

    #[test]
    fn the_textbook_backward_is_the_derivative_of_its_forward() {
        let (x, dy) = (wide(&values(1, 24, 1.0)), wide(&values(2, 24, 1.0)));
        let (scale, shift) = (wide(&values(3, 3, 1.0)), wide(&values(4, 3, 1.0)));
        let loss = |x: &[f64], scale: &[f64], shift: &[f64]| dot(&plain_forward(x, scale, shift)[0], &dy);
        let [dx, dscale, dshift] = plain_backward(&dy, &x, &scale);
        let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<_>>();
        assert_close(&narrow(dx), &gradient(&x, |x| loss(x, &scale, &shift)), 1e-5);
        assert_close(&narrow(dscale), &gradient(&scale, |scale| loss(&x, scale, &shift)), 1e-5);
        assert_close(&narrow(dshift), &gradient(&shift, |shift| loss(&x, &scale, shift)), 1e-5);
    }

    #[test]
    fn running_statistics_follow_the_batches() {
        let (mean, rstd) = (values(1, 300, 1.0), values(2, 300, 1.0));
        let rstd: Vec<f32> = rstd.iter().map(|r| r.abs() + 0.25).collect();
        let unbiased = |r: &f32| (f64::from(*r).powi(-2) - f64::from(EPS)) * 12.0 / 11.0;
        let running_mean = mean.iter().map(|m| 0.9 + 0.1 * f64::from(*m)).collect();
        let running_variance = rstd.iter().map(|r| 1.8 + 0.1 * unbiased(r)).collect();
        check(&[running_mean, running_variance], |device, _| {
            let f32s = |data: &[f32]| tensor(device, DType::F32, &[300], data);
            let (mut running_mean, mut running_variance) = (f32s(&[1.0; 300]), f32s(&[2.0; 300]));
            fold(&f32s(&mean), &f32s(&rstd), 12, EPS, &mut running_mean, &mut running_variance).unwrap();
            vec![running_mean, running_variance]
        });
    }

    #[test]
    fn a_mean_far_from_zero_costs_no_accuracy() {
        let x: Vec<f32> = values(1, 60_000, 1.0).iter().map(|x| x * 0.125 + 1000.0).collect();
        let [_, mean, rstd] = plain_forward(&wide(&x), &[1.0, 1.0], &[0.0, 0.0]);
        for [device, ..] in devices() {
            let one = tensor(device, DType::F32, &[2], &[1.0, 1.0]);
            let x = tensor(device, DType::F32, &[30_000, 2], &x);
            let (_, m, r) = forward(&x, &one, &one, EPS).unwrap();
            assert_close(&m.to_f32(), &mean, 1e-7);
            assert_close(&r.to_f32(), &rstd, 1e-5);
        }
    }
}
