//! Layer normalisation (Ba, Kiros & Hinton 2016) over the last dimension.
//!
//! x, y: `[rows, c]`; scale, shift: `[c]`; statistics: f32 `[rows, 2]` = mean, rstd.
//!
//! With h = (x - mean) rstd and rstd = 1/sqrt(variance + eps):
//!
//! - y = h scale + shift
//! - dx = rstd (d - mean(d) - h mean(d h)), d = dy scale
//! - dscale = sum over rows of dy h, dshift = sum over rows of dy

pub(crate) mod cuda;

use crate::cpu::lanes;
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::elementwise::sum_into;
use crate::ops::{pieces, reduce};
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// (y, statistics).
pub fn forward(x: &Tensor, scale: &Tensor, shift: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!((scale.shape(), shift.shape()), (&[c][..], &[c][..]), "layer_norm: scale and shift");
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::forward(&cuda, x, scale, shift, eps),
    };
    let (scale, shift) = (pieces::widened(scale)?, pieces::widened(shift)?);
    let (scale, shift) = (scale.slice::<f32>(), shift.slice::<f32>());
    let mut y = x.empty_like(Category::Activations)?;
    let mut statistics = Tensor::empty(&x.device(), &[rows, 2], DType::F32, Category::Activations)?;
    let piece = pieces::rows(c);
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>().chunks(piece * c);
        let y = y.slice_mut::<T>().chunks_mut(piece * c);
        let parts = x.zip(y).zip(statistics.slice_mut::<f32>().chunks_mut(2 * piece));
        pieces::each(&cpu, parts, |((x, y), statistics)| {
            normalise(cpu.isa(), x, scale, shift, eps, y, statistics)
        });
    });
    Ok((y, statistics))
}

/// dx.
pub fn backward_input(dy: &Tensor, x: &Tensor, scale: &Tensor, statistics: &Tensor) -> Result<Tensor> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!(dy.shape(), x.shape(), "layer_norm: dy and x");
    assert_eq!(
        (scale.shape(), statistics.shape()),
        (&[c][..], &[rows, 2][..]),
        "layer_norm: scale, statistics"
    );
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::backward_input(&cuda, dy, x, scale, statistics),
    };
    let scale = pieces::widened(scale)?;
    let (scale, statistics) = (scale.slice::<f32>(), statistics.slice::<f32>());
    let mut dx = x.empty_like(Category::Activations)?;
    let piece = pieces::rows(c);
    with_float!(x.dtype(), T => {
        let (dy, x) = (dy.slice::<T>(), x.slice::<T>());
        cpu.for_pieces(dx.slice_mut::<T>(), piece * c, |at, dx| {
            let statistics = &statistics[at.start / c * 2..at.end / c * 2];
            differentiate(cpu.isa(), &dy[at.clone()], &x[at], scale, statistics, dx)
        });
    });
    Ok(dx)
}

/// (dx, y): the gradient, plus another one where it is given, and what the forward pass made of x, for a layer
/// behind that did not keep it. y has the forward pass's bits. A card adds `plus` before it rounds, in its place if
/// nobody else holds it; the host rounds first, as two operations would.
pub fn backward_remaking(
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    statistics: &Tensor,
    plus: Option<Tensor>,
) -> Result<(Tensor, Tensor)> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!(dy.shape(), x.shape(), "layer_norm: dy and x");
    assert!(plus.as_ref().is_none_or(|plus| plus.shape() == x.shape()), "layer_norm: what is added and x");
    assert_eq!((scale.shape(), shift.shape()), (&[c][..], &[c][..]), "layer_norm: scale and shift");
    assert_eq!(statistics.shape(), [rows, 2], "layer_norm: statistics");
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::backward_remaking(&cuda, dy, x, scale, shift, statistics, plus),
    };
    let (scale, shift) = (pieces::widened(scale)?, pieces::widened(shift)?);
    let (scale, shift, statistics) = (scale.slice::<f32>(), shift.slice::<f32>(), statistics.slice::<f32>());
    let (mut dx, mut y) = (x.empty_like(Category::Activations)?, x.empty_like(Category::Activations)?);
    let piece = pieces::rows(c);
    with_float!(x.dtype(), T => {
        let (dy, x, plus) = (dy.slice::<T>(), x.slice::<T>(), plus.as_ref().map(|plus| plus.slice::<T>()));
        let parts = dx.slice_mut::<T>().chunks_mut(piece * c).zip(y.slice_mut::<T>().chunks_mut(piece * c));
        pieces::each(&cpu, parts.enumerate(), |(i, (dx, y))| {
            let at = i * piece * c..i * piece * c + dx.len();
            let (x, statistics) = (&x[at.clone()], &statistics[at.start / c * 2..at.end / c * 2]);
            differentiate(cpu.isa(), &dy[at.clone()], x, scale, statistics, dx);
            renormalise(cpu.isa(), x, scale, shift, statistics, y);
            if let Some(plus) = plus {
                sum_into(cpu.isa(), &plus[at], dx);
            }
        });
    });
    Ok((dx, y))
}

/// (dscale, dshift), as `dtype`.
pub fn backward_weights(
    dy: &Tensor,
    x: &Tensor,
    statistics: &Tensor,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!(dy.shape(), x.shape(), "layer_norm: dy and x");
    assert_eq!(statistics.shape(), [rows, 2], "layer_norm: statistics");
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::backward_weights(&cuda, dy, x, statistics, dtype),
    };
    let piece = reduce::partial_rows(c);
    let mut partial = reduce::partials(x, rows, 2 * c)?;
    with_float!(x.dtype(), T => {
        let parts = dy.slice::<T>().chunks(piece * c).zip(x.slice::<T>().chunks(piece * c));
        let parts = parts.zip(statistics.slice::<f32>().chunks(2 * piece));
        let parts = parts.zip(partial.slice_mut::<f32>().chunks_mut(2 * c));
        pieces::each(&cpu, parts, |(((dy, x), statistics), sums)| {
            let (dscale, dshift) = sums.split_at_mut(c);
            add_products(cpu.isa(), dy, x, statistics, dscale, dshift)
        });
    });
    let part = |first| reduce::total(&cpu, &partial, first, c, dtype, Category::Workspace);
    Ok((part(0)?, part(c)?))
}

/// y = (x - mean) rstd scale + shift for one row.
#[inline(always)]
fn scale_and_shift<T: Float>(x: &[T], [mean, rstd]: [f32; 2], scale: &[f32], shift: &[f32], y: &mut [T]) {
    for (((y, x), scale), shift) in y.iter_mut().zip(x).zip(scale).zip(shift) {
        *y = T::from_f32((x.to_f32() - mean) * rstd * scale + shift);
    }
}

simd! {
    fn normalise[T: Float](
        x: &[T],
        scale: &[f32],
        shift: &[f32],
        eps: f32,
        y: &mut [T],
        statistics: &mut [f32],
    ) {
        let c = scale.len();
        let per_element = 1.0 / c as f32;
        let rows = x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(statistics.as_chunks_mut::<2>().0);
        for ((x, y), statistics) in rows {
            let mean = lanes::sum(x, |x| x) * per_element;
            // A second pass over a row in the cache; E[x^2] - mean^2 would cancel.
            let variance = lanes::sum(x, |x| (x - mean) * (x - mean)) * per_element;
            let rstd = 1.0 / (variance + eps).sqrt();
            scale_and_shift(x, [mean, rstd], scale, shift, y);
            *statistics = [mean, rstd];
        }
    }

    fn renormalise[T: Float](x: &[T], scale: &[f32], shift: &[f32], statistics: &[f32], y: &mut [T]) {
        let c = scale.len();
        let rows = x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(statistics.as_chunks::<2>().0);
        for ((x, y), &known) in rows {
            scale_and_shift(x, known, scale, shift, y);
        }
    }

    fn differentiate[T: Float](dy: &[T], x: &[T], scale: &[f32], statistics: &[f32], dx: &mut [T]) {
        let c = scale.len();
        let per_element = 1.0 / c as f32;
        let rows = dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(dx.chunks_exact_mut(c));
        for (((dy, x), dx), &[mean, rstd]) in rows.zip(statistics.as_chunks::<2>().0) {
            let mean_d = lanes::sum2(dy, scale, |dy, scale| dy * scale) * per_element;
            let mean_dh =
                lanes::sum3(dy, x, scale, |dy, x, scale| dy * scale * (x - mean)) * rstd * per_element;
            for (((dx, dy), x), scale) in dx.iter_mut().zip(dy).zip(x).zip(scale) {
                let h = (x.to_f32() - mean) * rstd;
                *dx = T::from_f32(rstd * (dy.to_f32() * scale - mean_d - h * mean_dh));
            }
        }
    }

    fn add_products[T: Float](
        dy: &[T],
        x: &[T],
        statistics: &[f32],
        dscale: &mut [f32],
        dshift: &mut [f32],
    ) {
        dscale.fill(0.0);
        dshift.fill(0.0);
        let c = dscale.len();
        let rows = dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(statistics.as_chunks::<2>().0);
        for ((dy, x), &[mean, rstd]) in rows {
            for (((dscale, dshift), dy), x) in dscale.iter_mut().zip(dshift.iter_mut()).zip(dy).zip(x) {
                *dscale += dy.to_f32() * ((x.to_f32() - mean) * rstd);
                *dshift += dy.to_f32();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::elementwise::add;
    use crate::testing::{address, check, check_like_host, dot, gradient, tensor, values, wide};
    use proptest::prelude::*;

    fn reference(x: &[f64], scale: &[f64], shift: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
        let c = scale.len() as f64;
        let (mut y, mut statistics) = (vec![], vec![]);
        for x in x.chunks(scale.len()) {
            let mean = x.iter().sum::<f64>() / c;
            let rstd = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / c + eps).sqrt();
            y.extend(
                x.iter().zip(scale).zip(shift).map(|((x, scale), shift)| (x - mean) * rstd * scale + shift),
            );
            statistics.extend([mean, rstd]);
        }
        (y, statistics)
    }

    /// Checks y made again and dx against those at hand; returns dx plus another gradient.
    fn remade([dy, x, scale, shift, statistics, y, dx]: [&Tensor; 7], plus: Tensor) -> Tensor {
        let run = |plus| backward_remaking(dy, x, scale, shift, statistics, plus).unwrap();
        let (again, remade) = run(None);
        assert_eq!(remade.host_bytes(), y.host_bytes());
        assert_eq!(again.host_bytes(), dx.host_bytes());
        let (sum, remade) = run(Some(plus.clone()));
        assert_eq!(remade.host_bytes(), y.host_bytes());
        if matches!(x.device(), Device::Cpu(_)) {
            assert_eq!(sum.host_bytes(), add(dx, &plus).unwrap().host_bytes());
        } else {
            let place = address(&plus);
            let (in_place, _) = run(Some(plus));
            assert_eq!((address(&in_place), in_place.host_bytes()), (place, sum.host_bytes()));
        }
        sum
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn all_passes_agree_with_the_formula(rows in 1usize..300, c in 2usize..150, seed: u64) {
            let eps = 1e-2;
            let (x, dy) = (values(seed, rows * c, 2.0), values(seed ^ 1, rows * c, 1.0));
            let (scale, shift) = (values(seed ^ 2, c, 1.0), values(seed ^ 3, c, 1.0));
            let plus = values(seed ^ 4, rows * c, 1.0);
            let [x64, dy64, scale64, shift64] = [&x, &dy, &scale, &shift].map(|x| wide(x));
            let (y, statistics) = reference(&x64, &scale64, &shift64, eps);
            // Rows do not see each other: their differences can be taken one by one.
            let row = |(x, dy): (&[f64], &[f64])| {
                gradient(x, |x| dot(&reference(x, &scale64, &shift64, eps).0, dy))
            };
            let dx: Vec<f64> = x64.chunks(c).zip(dy64.chunks(c)).flat_map(row).collect();
            let dscale = gradient(&scale64, |scale| dot(&reference(&x64, scale, &shift64, eps).0, &dy64));
            let dshift = gradient(&shift64, |shift| dot(&reference(&x64, &scale64, shift, eps).0, &dy64));
            let sum = dx.iter().zip(&plus).map(|(dx, plus)| dx + f64::from(*plus)).collect();
            check(&[y, statistics, dx, sum, dscale, dshift], |device, dtype| {
                let (x, dy) = (tensor(device, dtype, &[rows, c], &x), tensor(device, dtype, &[rows, c], &dy));
                let (scale, shift) = (tensor(device, dtype, &[c], &scale), tensor(device, dtype, &[c], &shift));
                let plus = tensor(device, dtype, &[rows, c], &plus);
                let (y, statistics) = forward(&x, &scale, &shift, eps as f32).unwrap();
                let dx = backward_input(&dy, &x, &scale, &statistics).unwrap();
                let sum = remade([&dy, &x, &scale, &shift, &statistics, &y, &dx], plus);
                let (dscale, dshift) = backward_weights(&dy, &x, &statistics, DType::F32).unwrap();
                vec![y, statistics, dx, sum, dscale, dshift]
            });
        }
    }

    /// Rows that a card gives to a block instead of a warp, and weights of the other type.
    #[test]
    fn long_rows_and_weights_of_another_type() {
        for (rows, c) in [(300, 768), (5, 1023), (3, 4096), (2, 20_001), (2, 30_000)] {
            let (x, dy) = (values(1, rows * c, 2.0), values(2, rows * c, 1.0));
            let (scale, shift) = (values(3, c, 1.0), values(4, c, 1.0));
            check_like_host(|device, dtype| {
                let other = if dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
                let (x, dy) = (tensor(device, dtype, &[rows, c], &x), tensor(device, dtype, &[rows, c], &dy));
                let (scale, shift) =
                    (tensor(device, other, &[c], &scale), tensor(device, dtype, &[c], &shift));
                let plus = dy.duplicate(Category::Activations).unwrap();
                let (y, statistics) = forward(&x, &scale, &shift, 1e-5).unwrap();
                let dx = backward_input(&dy, &x, &scale, &statistics).unwrap();
                let sum = remade([&dy, &x, &scale, &shift, &statistics, &y, &dx], plus);
                let (dscale, dshift) = backward_weights(&dy, &x, &statistics, dtype).unwrap();
                vec![y, statistics, dx, sum, dscale, dshift]
            });
        }
    }
}
