//! Both norms against their formulas in f64, through the functions that others call.

use super::*;
use crate::ops::elementwise::add;
use crate::ops::{layer_norm, rms_norm};
use crate::testing::{address, check, check_like_host, dot, gradient, tensor, values, wide};
use proptest::prelude::*;

/// A norm's public functions with its N weights as one argument, and its formula: (y, statistics).
#[expect(clippy::type_complexity, reason = "each says in full what it takes, as the functions themselves do")]
struct NormFunctions<const N: usize> {
    forward: fn(&Tensor, [&Tensor; N], f32) -> Result<(Tensor, Tensor)>,
    backward_input: fn(&Tensor, &Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    backward_remaking:
        fn(&Tensor, &Tensor, [&Tensor; N], &Tensor, Option<Tensor>) -> Result<(Tensor, Tensor)>,
    backward_weights: fn(&Tensor, &Tensor, &Tensor, DType) -> Result<[Tensor; N]>,
    reference: fn(&[f64], [&[f64]; N], f64) -> (Vec<f64>, Vec<f64>),
}

const LAYER_NORM: NormFunctions<2> = NormFunctions {
    forward: |x, [scale, shift], eps| layer_norm::forward(x, scale, shift, eps),
    backward_input: layer_norm::backward_input,
    backward_remaking: |dy, x, [scale, shift], statistics, plus| {
        layer_norm::backward_remaking(dy, x, scale, shift, statistics, plus)
    },
    backward_weights: |dy, x, statistics, dtype| {
        layer_norm::backward_weights(dy, x, statistics, dtype).map(|(dscale, dshift)| [dscale, dshift])
    },
    reference: |x, [scale, shift], eps| {
        let c = scale.len() as f64;
        let (mut y, mut statistics) = (vec![], vec![]);
        for x in x.chunks(scale.len()) {
            let mean = x.iter().sum::<f64>() / c;
            let rstd = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / c + eps).sqrt();
            let row = x.iter().zip(scale).zip(shift);
            y.extend(row.map(|((x, scale), shift)| (x - mean) * rstd * scale + shift));
            statistics.extend([mean, rstd]);
        }
        (y, statistics)
    },
};

const RMS_NORM: NormFunctions<1> = NormFunctions {
    forward: |x, [scale], eps| rms_norm::forward(x, scale, eps),
    backward_input: rms_norm::backward_input,
    backward_remaking: |dy, x, [scale], statistics, plus| {
        rms_norm::backward_remaking(dy, x, scale, statistics, plus)
    },
    backward_weights: |dy, x, statistics, dtype| {
        rms_norm::backward_weights(dy, x, statistics, dtype).map(|dscale| [dscale])
    },
    reference: |x, [scale], eps| {
        let (mut y, mut statistics) = (vec![], vec![]);
        for x in x.chunks(scale.len()) {
            let rstd = 1.0 / (dot(x, x) / scale.len() as f64 + eps).sqrt();
            y.extend(x.iter().zip(scale).map(|(x, scale)| x * rstd * scale));
            statistics.push(rstd);
        }
        (y, statistics)
    },
};

impl<const N: usize> NormFunctions<N> {
    /// y, the statistics, dx, dx plus another gradient, the weights' gradients as `dtype`. y and dx are made
    /// in two ways, which must agree.
    fn all_passes(
        &self,
        [dy, x]: [&Tensor; 2],
        weights: [&Tensor; N],
        plus: Tensor,
        eps: f32,
        dtype: DType,
    ) -> Vec<Tensor> {
        let (y, statistics) = (self.forward)(x, weights, eps).unwrap();
        let dx = (self.backward_input)(dy, x, weights[0], &statistics).unwrap();
        let run = |plus| (self.backward_remaking)(dy, x, weights, &statistics, plus).unwrap();
        let (again, remade) = run(None);
        assert_eq!(remade.host_bytes(), y.host_bytes());
        assert_eq!(again.host_bytes(), dx.host_bytes());
        let (sum, remade) = run(Some(plus.clone()));
        assert_eq!(remade.host_bytes(), y.host_bytes());
        if matches!(x.device(), Device::Cpu(_)) {
            assert_eq!(sum.host_bytes(), add(&dx, &plus).unwrap().host_bytes());
        } else {
            let place = address(&plus);
            let (in_place, _) = run(Some(plus));
            assert_eq!((address(&in_place), in_place.host_bytes()), (place, sum.host_bytes()));
        }
        let totals = (self.backward_weights)(dy, x, &statistics, dtype).unwrap();
        [y, statistics, dx, sum].into_iter().chain(totals).collect()
    }

    fn agrees_with_the_formula(&self, rows: usize, c: usize, seed: u64) {
        // As large as a square: dx of a row with one or two numbers is what eps leaves of a difference, and
        // loses digits by less.
        let eps = 1.0;
        let (x, dy) = (values(seed, rows * c, 2.0), values(seed ^ 1, rows * c, 1.0));
        let weights: [Vec<f32>; N] = std::array::from_fn(|i| values(seed ^ (2 + i as u64), c, 1.0));
        let plus = values(seed ^ 4, rows * c, 1.0);
        let (x64, dy64, weights64) = (wide(&x), wide(&dy), weights.each_ref().map(|weight| wide(weight)));
        let slices = weights64.each_ref().map(Vec::as_slice);
        let (y, statistics) = (self.reference)(&x64, slices, eps);
        // Rows do not see each other: their differences can be taken one by one.
        let row = |(x, dy): (&[f64], &[f64])| gradient(x, |x| dot(&(self.reference)(x, slices, eps).0, dy));
        let dx: Vec<f64> = x64.chunks(c).zip(dy64.chunks(c)).flat_map(row).collect();
        let sum = dx.iter().zip(&plus).map(|(dx, plus)| dx + f64::from(*plus)).collect();
        let of_weight = |i: usize| {
            gradient(slices[i], |weight| {
                let mut weights = slices;
                weights[i] = weight;
                dot(&(self.reference)(&x64, weights, eps).0, &dy64)
            })
        };
        let expected: Vec<_> = [y, statistics, dx, sum].into_iter().chain((0..N).map(of_weight)).collect();
        check(&expected, |device, dtype| {
            let matrix = |data| tensor(device, dtype, &[rows, c], data);
            let weights = weights.each_ref().map(|weight| tensor(device, dtype, &[c], weight));
            self.all_passes(
                [&matrix(&dy), &matrix(&x)],
                weights.each_ref(),
                matrix(&plus),
                eps as f32,
                DType::F32,
            )
        });
    }

    fn takes_long_rows_and_a_scale_of_another_type(&self) {
        for (rows, c) in [(300, 768), (5, 1023), (3, 4096), (2, 20_001), (2, 30_000)] {
            let (x, dy) = (values(1, rows * c, 2.0), values(2, rows * c, 1.0));
            let weights: [Vec<f32>; N] = std::array::from_fn(|i| values(3 + i as u64, c, 1.0));
            check_like_host(|device, dtype| {
                let other = if dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
                let matrix = |data| tensor(device, dtype, &[rows, c], data);
                let weights: [Tensor; N] = std::array::from_fn(|i| {
                    tensor(device, if i == 0 { other } else { dtype }, &[c], &weights[i])
                });
                self.all_passes([&matrix(&dy), &matrix(&x)], weights.each_ref(), matrix(&dy), 1e-5, dtype)
            });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn layer_norm_agrees_with_its_formula(rows in 1usize..300, c in 2usize..150, seed: u64) {
        LAYER_NORM.agrees_with_the_formula(rows, c, seed);
    }

    #[test]
    fn rms_norm_agrees_with_its_formula(rows in 1usize..300, c in 1usize..150, seed: u64) {
        RMS_NORM.agrees_with_the_formula(rows, c, seed);
    }
}

/// A GPU gives these rows to a block instead of a warp.
#[test]
fn layer_norm_takes_long_rows_and_a_scale_of_another_type() {
    LAYER_NORM.takes_long_rows_and_a_scale_of_another_type();
}

#[test]
fn rms_norm_takes_long_rows_and_a_scale_of_another_type() {
    RMS_NORM.takes_long_rows_and_a_scale_of_another_type();
}

#[test]
#[should_panic(expected = "layer_norm: a weight for each channel")]
fn a_weight_of_another_length_is_refused() {
    let device = Device::cpu(1).unwrap();
    let of = |shape: &[usize]| tensor(&device, DType::F32, shape, &vec![1.0; shape.iter().product()]);
    let _ = layer_norm::forward(&of(&[2, 3]), &of(&[3]), &of(&[4]), 1e-5);
}

#[test]
#[should_panic(expected = "rms_norm: statistics")]
fn the_statistics_of_other_rows_are_refused() {
    let device = Device::cpu(1).unwrap();
    let of = |shape: &[usize]| tensor(&device, DType::F32, shape, &vec![1.0; shape.iter().product()]);
    let _ = rms_norm::backward_input(&of(&[2, 3]), &of(&[2, 3]), &of(&[3]), &of(&[2, 2]));
}
