//! Batch normalisation: every channel gets mean 0 and variance 1 over the batch, then a scale and a shift.
//!
//! ```text
//! xhat = (x - mean) rstd,   rstd = 1 / sqrt(variance + eps),   y = xhat scale + shift
//! dx = scale rstd (dy - (dshift + xhat dscale) / n),   dscale = sum dy xhat,   dshift = sum dy
//! ```
//! x: [.., c], n rows of c channels; mean, rstd, variance: f32 `[c]`; scale, shift: `[c]`. The variance is the
//! biased one (divided by n), which normalises; a running estimate wants it times n / (n - 1).
//!
//! Statistics are taken over chunks of rows, in two passes while a chunk is in the cache, and joined in f64 by
//! the rule of Chan, Golub and LeVeque (1979): no cancellation, and the same bits on any number of threads.
//!
//! Where x holds only some of the rows of a batch, both passes come in two halves: [`measure`] and
//! [`normalise`], [`measure_gradient`] and [`input_gradient`]. Between them the caller adds up a few numbers
//! a channel over all that hold the others: `sum x` and `sum x^2` in the forward pass, `sum dy` and
//! `sum dy (x - mean)` in the backward pass. They travel in f64, in which the squares of f32 numbers leave room
//! enough.
//!
//! A sum with a tensor of the same shape and ReLU, as they stand behind the norms of residual networks, run
//! in the same pass over memory ([`NormEpilogue`]). On a GPU so do their gradients ([`backward_relu`],
//! [`backward_relu_sum`]): ReLU alone is made again from what the norm reads anyway.

pub(crate) mod cuda;
mod host;
mod moments;
#[cfg(test)]
mod tests;

use super::activation::{self, ActivationFn};
use super::elementwise::{add, add_into};
use super::pool::cuda::{PoolNorm, PoolNormGradient};
use super::pool::{self, PoolParams};
use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;
use moments::ChannelMoments;

/// How much of a batch's statistics enters the running ones, as in PyTorch.
pub const MOMENTUM: f32 = 0.1;

/// Numbers of chunks of rows: `[chunks, 2, c]`, each chunk of as many rows but perhaps the last.
struct PartialStats {
    numbers: Tensor,
    chunk: usize,
}

/// What a norm does on its way out: adds a tensor of its shape, then sets what is negative to zero.
#[derive(Debug, Clone, Copy, Default)]
pub struct NormEpilogue<'a> {
    pub plus: Option<&'a Tensor>,
    pub relu: bool,
}

impl NormEpilogue<'_> {
    /// The same as steps of their own, on the host.
    fn apply(&self, mut y: Tensor) -> Result<Tensor> {
        if let Some(plus) = self.plus {
            add_into(&mut y, plus)?;
        }
        if self.relu { activation::forward_owned(ActivationFn::Relu, y) } else { Ok(y) }
    }
}

/// Normalises by the batch's own statistics: `(y, mean, rstd)`.
pub fn forward(
    x: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    eps: f32,
    epilogue: NormEpilogue<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    check_channels(x.width(), [(scale, "scale"), (shift, "shift")]);
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => {
            let [mean, rstd] = cuda::statistics(&gpu, x, eps)?;
            return Ok((
                cuda::normalise(&gpu, x, [scale, shift], [&mean, &rstd], None, epilogue)?,
                mean,
                rstd,
            ));
        }
    };
    let moments = ChannelMoments::of(x)?;
    let (mean, rstd) = moments.statistics(&x.device(), eps)?;
    let y = host::normalise(&cpu, x, scale, shift, mean.slice(), rstd.slice())?;
    Ok((epilogue.apply(y)?, mean, rstd))
}

/// [`forward`], and [`pool::max_forward`] of that: `(y, places, [mean, rstd])`. A GPU's pool normalises what
/// it reads: neither what the norm gives nor its gradient is ever in memory.
pub fn forward_max(
    x: &Tensor,
    [scale, shift]: [&Tensor; 2],
    eps: f32,
    pool: PoolParams,
    relu: bool,
) -> Result<(Tensor, Tensor, [Tensor; 2])> {
    check_channels(x.width(), [(scale, "scale"), (shift, "shift")]);
    let Device::Cuda(gpu) = x.device() else {
        let (normed, mean, rstd) = forward(x, scale, shift, eps, NormEpilogue::default())?;
        let (y, places) = pool::max_forward(&normed, pool, relu)?;
        return Ok((y, places, [mean, rstd]));
    };
    let statistics = cuda::statistics(&gpu, x, eps)?;
    let norm = PoolNorm { weights: [scale, shift], statistics: statistics.each_ref() };
    let (y, places) = pool::cuda::max_forward(&gpu, x, Some(norm), pool, relu)?;
    Ok((y, places, statistics))
}

/// What x has to say of a batch of which it holds some rows: numbers that add up over all that hold the others.
pub fn measure(x: &Tensor) -> Result<Vec<f64>> {
    Ok(ChannelMoments::of(x)?.to_sums())
}

/// Normalises by such numbers, added up: `(y, mean, rstd, rows)`.
pub fn normalise(
    x: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    eps: f32,
    sums: &[f64],
    epilogue: NormEpilogue<'_>,
) -> Result<(Tensor, Tensor, Tensor, usize)> {
    let moments = ChannelMoments::from_sums(sums);
    let (mean, rstd) = moments.statistics(&x.device(), eps)?;
    let y = remake(x, [scale, shift], [&mean, &rstd], epilogue)?;
    Ok((y, mean, rstd, moments.rows as usize))
}

/// Normalises by given statistics.
pub fn evaluate(
    x: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    mean: &Tensor,
    variance: &Tensor,
    eps: f32,
    epilogue: NormEpilogue<'_>,
) -> Result<Tensor> {
    check_channels(x.width(), [(scale, "scale"), (shift, "shift"), (mean, "mean"), (variance, "variance")]);
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => {
            return cuda::normalise(&gpu, x, [scale, shift], [mean, variance], Some(eps), epilogue);
        }
    };
    let rstd: Vec<f32> = variance.slice::<f32>().iter().map(|v| 1.0 / (v + eps).sqrt()).collect();
    epilogue.apply(host::normalise(&cpu, x, scale, shift, mean.slice(), &rstd)?)
}

/// The gradients `(dx, dscale, dshift)` of [`forward`] without an epilogue.
pub fn backward(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    check_gradient(dy, x, scale, mean, rstd);
    if let Device::Cuda(gpu) = x.device() {
        return cuda::backward(&gpu, [dy, x], scale, [mean, rstd]);
    }
    let sums = measure_gradient(dy, x, mean)?;
    let dx = input_gradient(dy, x, scale, mean, rstd, &sums)?;
    let (dscale, dshift) = scale_and_shift(scale, rstd, &sums)?;
    Ok((dx, dscale, dshift))
}

/// The gradients of [`forward_max`], from the places that it gave: `(dx, dscale, dshift)`.
pub fn backward_max(
    dy: &Tensor,
    places: &Tensor,
    pool: PoolParams,
    x: &Tensor,
    scale: &Tensor,
    [mean, rstd]: [&Tensor; 2],
) -> Result<(Tensor, Tensor, Tensor)> {
    let Device::Cuda(gpu) = x.device() else {
        let dy = pool::max_backward(dy, places, pool, x.shape())?;
        return backward(&dy, x, scale, mean, rstd);
    };
    let sums = pool::cuda::max_gradient_sums(&gpu, dy, places, [x, mean], pool)?;
    let (line, dscale, dshift) = cuda::line(&gpu, &sums, x, scale, rstd)?;
    let norm = PoolNormGradient { x, mean, line: &line };
    Ok((pool::cuda::max_backward(&gpu, dy, places, Some(norm), pool, x.shape())?, dscale, dshift))
}

/// The gradients of [`forward`] with ReLU at its end, of which y was the output: `(dx, dscale, dshift)`.
pub fn backward_relu(
    dy: Tensor,
    x: &Tensor,
    y: &Tensor,
    [scale, shift]: [&Tensor; 2],
    [mean, rstd]: [&Tensor; 2],
) -> Result<(Tensor, Tensor, Tensor)> {
    check_gradient(&dy, x, scale, mean, rstd);
    assert_eq!(y.shape(), x.shape(), "the output of a norm and its input");
    if let Device::Cuda(gpu) = x.device() {
        return cuda::backward_gated(&gpu, &dy, x, [scale, shift], [mean, rstd], None);
    }
    let passed = activation::backward(ActivationFn::Relu, y, dy)?;
    backward(&passed, x, scale, mean, rstd)
}

/// The same where something was added before ReLU, and its gradient: `(dx, dscale, dshift, dplus)`. The gradient
/// of the output is `dy`, or `dy + more`. Overwrites dy if nobody else holds it.
pub fn backward_relu_sum(
    mut dy: Tensor,
    more: Option<Tensor>,
    x: &Tensor,
    y: &Tensor,
    scale: &Tensor,
    [mean, rstd]: [&Tensor; 2],
) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
    check_gradient(&dy, x, scale, mean, rstd);
    assert_eq!(y.shape(), x.shape(), "the output of a norm and its input");
    if let Some(more) = &more {
        check_gradient(more, x, scale, mean, rstd);
    }
    if let Device::Cuda(gpu) = x.device() {
        return cuda::backward_masked(&gpu, dy, more, x, y, scale, [mean, rstd]);
    }
    if let Some(more) = more {
        match dy.is_unique() {
            true => add_into(&mut dy, &more)?,
            false => dy = add(&dy, &more)?,
        }
    }
    let passed = activation::backward(ActivationFn::Relu, y, dy)?;
    let (dx, dscale, dshift) = backward(&passed, x, scale, mean, rstd)?;
    Ok((dx, dscale, dshift, passed))
}

/// The output of [`forward`] once more, from its statistics: the same bits.
pub fn remake(
    x: &Tensor,
    [scale, shift]: [&Tensor; 2],
    [mean, rstd]: [&Tensor; 2],
    epilogue: NormEpilogue<'_>,
) -> Result<Tensor> {
    check_channels(x.width(), [(scale, "scale"), (shift, "shift"), (mean, "mean"), (rstd, "deviation")]);
    match x.device() {
        Device::Cpu(cpu) => {
            epilogue.apply(host::normalise(&cpu, x, scale, shift, mean.slice(), rstd.slice())?)
        }
        Device::Cuda(gpu) => cuda::normalise(&gpu, x, [scale, shift], [mean, rstd], None, epilogue),
    }
}

/// As [`backward_relu`] where nothing was added, for a layer behind ReLU that did not keep what it read:
/// `(dx, dscale, dshift, y)`.
pub fn backward_remaking(
    dy: Tensor,
    x: &Tensor,
    [scale, shift]: [&Tensor; 2],
    [mean, rstd]: [&Tensor; 2],
) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
    check_gradient(&dy, x, scale, mean, rstd);
    if let Device::Cuda(gpu) = x.device() {
        let mut y = x.empty_like(Category::Transient)?;
        let (dx, dscale, dshift) =
            cuda::backward_gated(&gpu, &dy, x, [scale, shift], [mean, rstd], Some(&mut y))?;
        return Ok((dx, dscale, dshift, y));
    }
    let y = remake(x, [scale, shift], [mean, rstd], NormEpilogue { plus: None, relu: true })?;
    let passed = activation::backward(ActivationFn::Relu, &y, dy)?;
    let (dx, dscale, dshift) = backward(&passed, x, scale, mean, rstd)?;
    Ok((dx, dscale, dshift, y))
}

#[track_caller]
fn check_gradient(dy: &Tensor, x: &Tensor, scale: &Tensor, mean: &Tensor, rstd: &Tensor) {
    assert_eq!(dy.shape(), x.shape(), "the gradient of a normalised tensor");
    assert_eq!(dy.dtype(), x.dtype(), "a tensor and its gradient have one type");
    check_channels(x.width(), [(scale, "scale"), (mean, "mean"), (rstd, "deviation")]);
}

/// Each channel's sum of dy, its sum of dy (x - mean), and the rows: numbers that add up over all that hold
/// rows of a batch.
pub fn measure_gradient(dy: &Tensor, x: &Tensor, mean: &Tensor) -> Result<Vec<f64>> {
    let (device, c) = (x.device(), x.width());
    let chunks = match &device {
        Device::Cpu(cpu) => host::gradient_sums(cpu, dy, x, mean)?,
        Device::Cuda(gpu) => cuda::gradient_sums(gpu, dy, x, mean)?,
    };
    let mut sums = vec![0.0f64; 2 * c];
    for partial in chunks.numbers.read_f32()?.chunks_exact(2 * c) {
        sums.iter_mut().zip(partial).for_each(|(sum, partial)| *sum += f64::from(*partial));
    }
    sums.push(x.rows() as f64);
    Ok(sums)
}

/// dx, from such sums over all rows of the batch.
pub fn input_gradient(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
    sums: &[f64],
) -> Result<Tensor> {
    check_gradient(dy, x, scale, mean, rstd);
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
    match &device {
        Device::Cpu(cpu) => host::input_gradient(cpu, dy, x, mean, &line),
        Device::Cuda(gpu) => {
            let line = Tensor::from_slice(&device, &[3, c], &line, Category::Workspace)?;
            cuda::input_gradient(gpu, dy, x, mean, &line)
        }
    }
}

/// `(dscale, dshift)` of some rows, from their sums: those of a batch's shards add up.
pub fn scale_and_shift(scale: &Tensor, rstd: &Tensor, sums: &[f64]) -> Result<(Tensor, Tensor)> {
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
    let statistics = [(rstd, "deviation"), (&*running_mean, "mean"), (&*running_variance, "variance")];
    check_channels(mean.len(), statistics);
    let unbias = count as f32 / (count.max(2) - 1) as f32;
    if let Device::Cuda(gpu) = mean.device() {
        return cuda::fold(&gpu, [mean, rstd], [unbias, eps, MOMENTUM], [running_mean, running_variance]);
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
