//! Normalisation by the root mean square (Zhang & Sennrich 2019) over the last dimension.
//!
//! x, y: `[rows, c]`; scale: `[c]`; statistics: f32 `[rows]` = rstd.
//!
//! With h = x rstd and rstd = 1/sqrt(mean(x^2) + eps):
//!
//! - y = h scale
//! - dx = rstd (d - h mean(d h)), d = dy scale
//! - dscale = sum over rows of dy h

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
pub fn forward(x: &Tensor, scale: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!(scale.shape(), [c], "rms_norm: scale");
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::forward(&cuda, x, scale, eps),
    };
    let scale = pieces::widened(scale)?;
    let scale = scale.slice::<f32>();
    let mut y = x.empty_like(Category::Activations)?;
    let mut statistics = Tensor::empty(&x.device(), &[rows], DType::F32, Category::Activations)?;
    let piece = pieces::rows(c);
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>().chunks(piece * c);
        let y = y.slice_mut::<T>().chunks_mut(piece * c);
        let parts = x.zip(y).zip(statistics.slice_mut::<f32>().chunks_mut(piece));
        pieces::each(&cpu, parts, |((x, y), rstd)| normalise(cpu.isa(), x, scale, eps, y, rstd));
    });
    Ok((y, statistics))
}

/// dx.
pub fn backward_input(dy: &Tensor, x: &Tensor, scale: &Tensor, statistics: &Tensor) -> Result<Tensor> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!(dy.shape(), x.shape(), "rms_norm: dy and x");
    assert_eq!(
        (scale.shape(), statistics.shape()),
        (&[c][..], &[rows][..]),
        "rms_norm: scale and statistics"
    );
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::backward_input(&cuda, dy, x, scale, statistics),
    };
    let scale = pieces::widened(scale)?;
    let (scale, rstd) = (scale.slice::<f32>(), statistics.slice::<f32>());
    let mut dx = x.empty_like(Category::Activations)?;
    let piece = pieces::rows(c);
    with_float!(x.dtype(), T => {
        let (dy, x) = (dy.slice::<T>(), x.slice::<T>());
        cpu.for_pieces(dx.slice_mut::<T>(), piece * c, |at, dx| {
            let rstd = &rstd[at.start / c..at.end / c];
            differentiate(cpu.isa(), &dy[at.clone()], &x[at], scale, rstd, dx)
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
    statistics: &Tensor,
    plus: Option<Tensor>,
) -> Result<(Tensor, Tensor)> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!(dy.shape(), x.shape(), "rms_norm: dy and x");
    assert!(plus.as_ref().is_none_or(|plus| plus.shape() == x.shape()), "rms_norm: what is added and x");
    assert_eq!(
        (scale.shape(), statistics.shape()),
        (&[c][..], &[rows][..]),
        "rms_norm: scale and statistics"
    );
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::backward_remaking(&cuda, dy, x, scale, statistics, plus),
    };
    let scale = pieces::widened(scale)?;
    let (scale, rstd) = (scale.slice::<f32>(), statistics.slice::<f32>());
    let (mut dx, mut y) = (x.empty_like(Category::Activations)?, x.empty_like(Category::Activations)?);
    let piece = pieces::rows(c);
    with_float!(x.dtype(), T => {
        let (dy, x, plus) = (dy.slice::<T>(), x.slice::<T>(), plus.as_ref().map(|plus| plus.slice::<T>()));
        let parts = dx.slice_mut::<T>().chunks_mut(piece * c).zip(y.slice_mut::<T>().chunks_mut(piece * c));
        pieces::each(&cpu, parts.enumerate(), |(i, (dx, y))| {
            let at = i * piece * c..i * piece * c + dx.len();
            let (x, rstd) = (&x[at.clone()], &rstd[at.start / c..at.end / c]);
            differentiate(cpu.isa(), &dy[at.clone()], x, scale, rstd, dx);
            renormalise(cpu.isa(), x, scale, rstd, y);
            if let Some(plus) = plus {
                sum_into(cpu.isa(), &plus[at], dx);
            }
        });
    });
    Ok((dx, y))
}

/// dscale, as `dtype`.
pub fn backward_weights(dy: &Tensor, x: &Tensor, statistics: &Tensor, dtype: DType) -> Result<Tensor> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!(dy.shape(), x.shape(), "rms_norm: dy and x");
    assert_eq!(statistics.shape(), [rows], "rms_norm: statistics");
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::backward_weights(&cuda, dy, x, statistics, dtype),
    };
    let piece = reduce::partial_rows(c);
    let mut partial = reduce::partials(x, rows, c)?;
    with_float!(x.dtype(), T => {
        let parts = dy.slice::<T>().chunks(piece * c).zip(x.slice::<T>().chunks(piece * c));
        let parts = parts.zip(statistics.slice::<f32>().chunks(piece));
        let parts = parts.zip(partial.slice_mut::<f32>().chunks_mut(c));
        pieces::each(&cpu, parts, |(((dy, x), rstd), dscale)| add_products(cpu.isa(), dy, x, rstd, dscale));
    });
    reduce::total(&cpu, &partial, 0, c, dtype, Category::Workspace)
}

/// y = x rstd scale for one row.
#[inline(always)]
fn scaled<T: Float>(x: &[T], rstd: f32, scale: &[f32], y: &mut [T]) {
    for ((y, x), scale) in y.iter_mut().zip(x).zip(scale) {
        *y = T::from_f32(x.to_f32() * rstd * scale);
    }
}

simd! {
    fn normalise[T: Float](x: &[T], scale: &[f32], eps: f32, y: &mut [T], rstd: &mut [f32]) {
        let c = scale.len();
        for ((x, y), rstd) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(rstd) {
            *rstd = 1.0 / (lanes::sum(x, |x| x * x) / c as f32 + eps).sqrt();
            scaled(x, *rstd, scale, y);
        }
    }

    fn renormalise[T: Float](x: &[T], scale: &[f32], rstd: &[f32], y: &mut [T]) {
        let c = scale.len();
        for ((x, y), &rstd) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(rstd) {
            scaled(x, rstd, scale, y);
        }
    }

    fn differentiate[T: Float](dy: &[T], x: &[T], scale: &[f32], rstd: &[f32], dx: &mut [T]) {
        let c = scale.len();
        let rows = dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(dx.chunks_exact_mut(c));
        for (((dy, x), dx), &rstd) in rows.zip(rstd) {
            let mean_dh = lanes::sum3(dy, x, scale, |dy, x, scale| dy * scale * x) * rstd / c as f32;
            for (((dx, dy), x), scale) in dx.iter_mut().zip(dy).zip(x).zip(scale) {
                *dx = T::from_f32(rstd * (dy.to_f32() * scale - x.to_f32() * rstd * mean_dh));
            }
        }
    }

    fn add_products[T: Float](dy: &[T], x: &[T], rstd: &[f32], dscale: &mut [f32]) {
        dscale.fill(0.0);
        let c = dscale.len();
        for ((dy, x), rstd) in dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(rstd) {
            for ((dscale, dy), x) in dscale.iter_mut().zip(dy).zip(x) {
                *dscale += dy.to_f32() * (x.to_f32() * rstd);
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

    fn reference(x: &[f64], scale: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
        let (mut y, mut statistics) = (vec![], vec![]);
        for x in x.chunks(scale.len()) {
            let rstd = 1.0 / (dot(x, x) / scale.len() as f64 + eps).sqrt();
            y.extend(x.iter().zip(scale).map(|(x, scale)| x * rstd * scale));
            statistics.push(rstd);
        }
        (y, statistics)
    }

    /// Checks y made again and dx against those at hand; returns dx plus another gradient.
    fn remade([dy, x, scale, statistics, y, dx]: [&Tensor; 6], plus: Tensor) -> Tensor {
        let run = |plus| backward_remaking(dy, x, scale, statistics, plus).unwrap();
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
        fn all_passes_agree_with_the_formula(rows in 1usize..300, c in 1usize..150, seed: u64) {
            let eps = 1e-2;
            let (x, dy) = (values(seed, rows * c, 2.0), values(seed ^ 1, rows * c, 1.0));
            let (scale, plus) = (values(seed ^ 2, c, 1.0), values(seed ^ 4, rows * c, 1.0));
            let [x64, dy64, scale64] = [&x, &dy, &scale].map(|x| wide(x));
            let (y, statistics) = reference(&x64, &scale64, eps);
            // Rows do not see each other: their differences can be taken one by one.
            let row = |(x, dy): (&[f64], &[f64])| gradient(x, |x| dot(&reference(x, &scale64, eps).0, dy));
            let dx: Vec<f64> = x64.chunks(c).zip(dy64.chunks(c)).flat_map(row).collect();
            let sum = dx.iter().zip(&plus).map(|(dx, plus)| dx + f64::from(*plus)).collect();
            let dscale = gradient(&scale64, |scale| dot(&reference(&x64, scale, eps).0, &dy64));
            check(&[y, statistics, dx, sum, dscale], |device, dtype| {
                let (x, dy) = (tensor(device, dtype, &[rows, c], &x), tensor(device, dtype, &[rows, c], &dy));
                let scale = tensor(device, dtype, &[c], &scale);
                let plus = tensor(device, dtype, &[rows, c], &plus);
                let (y, statistics) = forward(&x, &scale, eps as f32).unwrap();
                let dx = backward_input(&dy, &x, &scale, &statistics).unwrap();
                let sum = remade([&dy, &x, &scale, &statistics, &y, &dx], plus);
                let dscale = backward_weights(&dy, &x, &statistics, DType::F32).unwrap();
                vec![y, statistics, dx, sum, dscale]
            });
        }
    }

    /// Rows that a card gives to a block instead of a warp, and weights of the other type.
    #[test]
    fn long_rows_and_weights_of_another_type() {
        for (rows, c) in [(300, 768), (5, 1023), (3, 4096), (2, 20_001), (2, 30_000)] {
            let (x, dy) = (values(1, rows * c, 2.0), values(2, rows * c, 1.0));
            let scale = values(3, c, 1.0);
            check_like_host(|device, dtype| {
                let other = if dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
                let (x, dy) = (tensor(device, dtype, &[rows, c], &x), tensor(device, dtype, &[rows, c], &dy));
                let scale = tensor(device, other, &[c], &scale);
                let plus = dy.duplicate(Category::Activations).unwrap();
                let (y, statistics) = forward(&x, &scale, 1e-5).unwrap();
                let dx = backward_input(&dy, &x, &scale, &statistics).unwrap();
                let sum = remade([&dy, &x, &scale, &statistics, &y, &dx], plus);
                let dscale = backward_weights(&dy, &x, &statistics, dtype).unwrap();
                vec![y, statistics, dx, sum, dscale]
            });
        }
    }
}
