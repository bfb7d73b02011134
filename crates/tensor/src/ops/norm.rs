//! What layer norm and RMS norm share: how they walk over rows, on the host and on a GPU.
//!
//! Both bring each row to a unit spread, give each channel N weights and keep N numbers of each row for the
//! backward pass: layer norm two (scale, shift; mean, rstd), RMS norm one (scale; rstd). What happens to one
//! row is their own, a [`NormFormula`]. It is a trait although the set is closed: a row's loops must be
//! compiled with the formula in them.
//!
//! x, y: `[rows, c]`; weights: N of `[c]`, the scale first; statistics: f32 `[rows, N]`, or `[rows]` where N is 1.

pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::elementwise::sum_into;
use crate::ops::{cast, chunks, reduce};
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// A norm, by what it does to one row of c numbers. Its functions are `#[inline(always)]`, as [`simd!`] wants.
pub(super) trait NormFormula<const N: usize> {
    /// The operation's name, for messages.
    const NAME: &'static str;
    /// The kernels of its formulas on a GPU.
    const KERNELS: cuda::NormKernels;

    /// What is kept of a row.
    fn statistics<T: Float>(x: &[T], eps: f32) -> [f32; N];

    /// y.
    fn normalise<T: Float>(x: &[T], statistics: [f32; N], weights: [&[f32]; N], y: &mut [T]);

    /// dx.
    fn differentiate<T: Float>(dy: &[T], x: &[T], scale: &[f32], statistics: [f32; N], dx: &mut [T]);

    /// Adds the row's term of the weights' gradients.
    fn add_products<T: Float>(dy: &[T], x: &[T], statistics: [f32; N], sums: [&mut [f32]; N]);
}

/// (y, statistics).
pub(super) fn forward<F: NormFormula<N>, const N: usize>(
    x: &Tensor,
    weights: [&Tensor; N],
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    check_weights::<F, N>(x, &weights);
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::forward(&cuda, &F::KERNELS, x, weights, eps),
    };
    let weights = widened(weights)?;
    let weights = weights.each_ref().map(|weight| weight.slice::<f32>());
    let mut y = x.empty_like(Category::Transient)?;
    let mut statistics = empty_statistics::<N>(x)?;
    let (c, chunk) = (x.width(), chunks::rows(x.width()));
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>().chunks(chunk * c);
        let y = y.slice_mut::<T>().chunks_mut(chunk * c);
        let slices = x.zip(y).zip(statistics.slice_mut::<f32>().chunks_mut(N * chunk));
        chunks::each(&cpu, slices, |((x, y), statistics)| {
            normalise::<T, F, N>(cpu.isa(), x, weights, eps, y, statistics)
        });
    });
    Ok((y, statistics))
}

/// dx.
pub(super) fn backward_input<F: NormFormula<N>, const N: usize>(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    statistics: &Tensor,
) -> Result<Tensor> {
    check_weights::<F, N>(x, &[scale]);
    check_gradient::<F, N>(dy, x, statistics);
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::backward_input(&cuda, &F::KERNELS, dy, x, scale, statistics),
    };
    let scale = cast::widened(scale)?;
    let (scale, statistics) = (scale.slice::<f32>(), statistics.slice::<f32>());
    let mut dx = x.empty_like(Category::Transient)?;
    let (c, chunk) = (x.width(), chunks::rows(x.width()));
    with_float!(x.dtype(), T => {
        let (dy, x) = (dy.slice::<T>(), x.slice::<T>());
        cpu.for_chunks(dx.slice_mut::<T>(), chunk * c, |at, dx| {
            let statistics = &statistics[at.start / c * N..at.end / c * N];
            differentiate::<T, F, N>(cpu.isa(), &dy[at.clone()], &x[at], scale, statistics, dx)
        });
    });
    Ok(dx)
}

/// (dx plus another gradient where it is given, y).
pub(super) fn backward_remaking<F: NormFormula<N>, const N: usize>(
    dy: &Tensor,
    x: &Tensor,
    weights: [&Tensor; N],
    statistics: &Tensor,
    plus: Option<Tensor>,
) -> Result<(Tensor, Tensor)> {
    check_weights::<F, N>(x, &weights);
    check_gradient::<F, N>(dy, x, statistics);
    assert!(plus.as_ref().is_none_or(|plus| plus.shape() == x.shape()), "{}: what is added and x", F::NAME);
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => {
            return cuda::backward_remaking(&cuda, &F::KERNELS, dy, x, weights, statistics, plus);
        }
    };
    let weights = widened(weights)?;
    let weights = weights.each_ref().map(|weight| weight.slice::<f32>());
    let statistics = statistics.slice::<f32>();
    let (mut dx, mut y) = (x.empty_like(Category::Transient)?, x.empty_like(Category::Transient)?);
    let (c, chunk) = (x.width(), chunks::rows(x.width()));
    with_float!(x.dtype(), T => {
        let (dy, x, plus) = (dy.slice::<T>(), x.slice::<T>(), plus.as_ref().map(|plus| plus.slice::<T>()));
        let slices = dx.slice_mut::<T>().chunks_mut(chunk * c).zip(y.slice_mut::<T>().chunks_mut(chunk * c));
        chunks::each(&cpu, slices.enumerate(), |(i, (dx, y))| {
            let at = i * chunk * c..i * chunk * c + dx.len();
            let (x, statistics) = (&x[at.clone()], &statistics[at.start / c * N..at.end / c * N]);
            differentiate::<T, F, N>(cpu.isa(), &dy[at.clone()], x, weights[0], statistics, dx);
            renormalise::<T, F, N>(cpu.isa(), x, weights, statistics, y);
            if let Some(plus) = plus {
                sum_into(cpu.isa(), &plus[at], dx);
            }
        });
    });
    Ok((dx, y))
}

/// The weights' gradients, as `dtype`.
pub(super) fn backward_weights<F: NormFormula<N>, const N: usize>(
    dy: &Tensor,
    x: &Tensor,
    statistics: &Tensor,
    dtype: DType,
) -> Result<[Tensor; N]> {
    check_gradient::<F, N>(dy, x, statistics);
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::backward_weights(&cuda, &F::KERNELS, dy, x, statistics, dtype),
    };
    let (c, chunk) = (x.width(), reduce::partial_rows(x.width()));
    let mut partial = reduce::partials(x, x.rows(), N * c)?;
    with_float!(x.dtype(), T => {
        let slices = dy.slice::<T>().chunks(chunk * c).zip(x.slice::<T>().chunks(chunk * c));
        let slices = slices.zip(statistics.slice::<f32>().chunks(N * chunk));
        let slices = slices.zip(partial.slice_mut::<f32>().chunks_mut(N * c));
        chunks::each(&cpu, slices, |(((dy, x), statistics), sums)| {
            add_products::<T, F, N>(cpu.isa(), dy, x, statistics, sums)
        });
    });
    let total = |i| reduce::total(&cpu, &partial, i * c, c, dtype, Category::Workspace);
    Ok(all((0..N).map(total).collect::<Result<_>>()?))
}

fn check_weights<F: NormFormula<N>, const N: usize>(x: &Tensor, weights: &[&Tensor]) {
    for weight in weights {
        assert_eq!(weight.shape(), [x.width()], "{}: a weight for each channel", F::NAME);
    }
}

fn check_gradient<F: NormFormula<N>, const N: usize>(dy: &Tensor, x: &Tensor, statistics: &Tensor) {
    assert_eq!(dy.shape(), x.shape(), "{}: dy and x", F::NAME);
    assert_eq!(statistics.shape(), statistics_shape::<N>(x), "{}: statistics", F::NAME);
}

fn statistics_shape<const N: usize>(x: &Tensor) -> Vec<usize> {
    if N == 1 { vec![x.rows()] } else { vec![x.rows(), N] }
}

fn empty_statistics<const N: usize>(x: &Tensor) -> Result<Tensor> {
    Tensor::empty(&x.device(), &statistics_shape::<N>(x), DType::F32, Category::Transient)
}

fn widened<const N: usize>(weights: [&Tensor; N]) -> Result<[Tensor; N]> {
    Ok(all(weights.into_iter().map(cast::widened).collect::<Result<_>>()?))
}

fn all<const N: usize>(tensors: Vec<Tensor>) -> [Tensor; N] {
    tensors.try_into().expect("one for each of the N weights")
}

simd! {
    fn normalise[T: Float, F: NormFormula<N>; const N](
        x: &[T],
        weights: [&[f32]; N],
        eps: f32,
        y: &mut [T],
        statistics: &mut [f32],
    ) {
        let c = weights[0].len();
        let rows = x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(statistics.as_chunks_mut::<N>().0);
        for ((x, y), statistics) in rows {
            *statistics = F::statistics(x, eps);
            F::normalise(x, *statistics, weights, y);
        }
    }

    fn renormalise[T: Float, F: NormFormula<N>; const N](
        x: &[T],
        weights: [&[f32]; N],
        statistics: &[f32],
        y: &mut [T],
    ) {
        let c = weights[0].len();
        let rows = x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(statistics.as_chunks::<N>().0);
        for ((x, y), &statistics) in rows {
            F::normalise(x, statistics, weights, y);
        }
    }

    fn differentiate[T: Float, F: NormFormula<N>; const N](
        dy: &[T],
        x: &[T],
        scale: &[f32],
        statistics: &[f32],
        dx: &mut [T],
    ) {
        let c = scale.len();
        let rows = dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(dx.chunks_exact_mut(c));
        for (((dy, x), dx), &statistics) in rows.zip(statistics.as_chunks::<N>().0) {
            F::differentiate(dy, x, scale, statistics, dx);
        }
    }

    fn add_products[T: Float, F: NormFormula<N>; const N](dy: &[T], x: &[T], statistics: &[f32], sums: &mut [f32]) {
        sums.fill(0.0);
        let c = sums.len() / N;
        let mut rest = sums.chunks_exact_mut(c);
        let mut sums: [&mut [f32]; N] = std::array::from_fn(|_| rest.next().expect("N times c sums"));
        let rows = dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(statistics.as_chunks::<N>().0);
        for ((dy, x), &statistics) in rows {
            F::add_products(dy, x, statistics, sums.each_mut().map(|sums| &mut **sums));
        }
    }
}
