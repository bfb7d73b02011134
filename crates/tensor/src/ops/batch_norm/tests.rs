//! Batch norm against the textbook, of a batch and of shards of one.

use proptest::prelude::*;

use super::*;
use crate::dtype::DType;
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
    /// At least eight rows: of two or three, dx is a difference of numbers that are nearly equal.
    #[test]
    fn both_passes_agree_with_the_textbook(
        (batch, h, w, c) in (1usize..9, 1usize..20, 8usize..20, 1usize..200),
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
            let (y, mean, rstd) = forward(&x, &scale, &shift, EPS, NormEpilogue::default()).unwrap();
            let variance = rstd.to_f32().iter().map(|r| 1.0 / (r * r) - EPS).collect::<Vec<_>>();
            let variance = tensor(device, DType::F32, &[c], &variance);
            let again = evaluate(&x, &scale, &shift, &mean, &variance, EPS, NormEpilogue::default()).unwrap();
            let (dx, dscale, dshift) = backward(&dy, &x, &scale, &mean, &rstd).unwrap();
            vec![y, mean, rstd, again, dx, dscale, dshift]
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// With a sum and ReLU behind the norm, everything is what the textbook's steps give one after the other. At
    /// least eight rows, as above.
    #[test]
    fn sum_and_relu_are_parts_of_the_norm(
        (rows, c, added) in (8usize..700, 1usize..80, any::<bool>()),
        seed in 0u64..1000,
    ) {
        let (x, mut dy) = (values(seed, rows * c, 1.0), values(seed + 1, rows * c, 1.0));
        let (scale, shift) = (values(seed + 2, c, 1.0), values(seed + 3, c, 1.0));
        let (scale64, shift64) = (wide(&scale), wide(&shift));
        let [y, ..] = plain_forward(&wide(&x), &scale64, &shift64);
        let plus: Vec<f32> = values(seed + 4, rows * c, 1.0).iter().map(|p| 2.0 * p).collect();
        let sums: Vec<f64> = y.iter().zip(&plus).map(|(y, p)| if added { y + f64::from(*p) } else { *y }).collect();
        // So near to the kink of ReLU rounding decides on which side a sum lies.
        let is_near = |(sum, y): (&f64, &f64)| sum.abs() < 1e-2 * (1.0 + y.abs());
        dy.iter_mut().zip(sums.iter().zip(&y)).filter(|(_, of)| is_near(*of)).for_each(|(dy, _)| *dy = 0.0);
        let kept: Vec<f64> = sums.iter().zip(&dy).map(|(sum, dy)| if *sum > 0.0 { f64::from(*dy) } else { 0.0 }).collect();
        let [dx, dscale, dshift] = plain_backward(&kept, &wide(&x), &scale64);
        let cut: Vec<f64> = sums.iter().map(|sum| sum.max(0.0)).collect();
        let mut expected = vec![cut.clone(), cut, dx, dscale, dshift];
        expected.extend(added.then_some(kept));
        check(&expected, |device, dtype| {
            let of = |data: &[f32]| tensor(device, dtype, &[rows, c], data);
            let channels = |data: &[f32]| tensor(device, dtype, &[c], data);
            let (x, plus, scale, shift) = (of(&x), of(&plus), channels(&scale), channels(&shift));
            let epilogue = NormEpilogue { plus: added.then_some(&plus), relu: true };
            let (y, mean, rstd) = forward(&x, &scale, &shift, EPS, epilogue).unwrap();
            let variance = rstd.to_f32().iter().map(|r| 1.0 / (r * r) - EPS).collect::<Vec<_>>();
            let variance = tensor(device, DType::F32, &[c], &variance);
            let again = evaluate(&x, &scale, &shift, &mean, &variance, EPS, epilogue).unwrap();
            let in_parts = |dy, more| backward_relu_sum(dy, more, &x, &y, &scale, [&mean, &rstd]).unwrap();
            let backward = |dy| match added {
                true => {
                    let (dx, dscale, dshift, plus) = in_parts(dy, None);
                    (dx, dscale, dshift, Some(plus))
                }
                false => {
                    let (dx, dscale, dshift) =
                        backward_relu(dy, &x, &y, [&scale, &shift], [&mean, &rstd]).unwrap();
                    (dx, dscale, dshift, None)
                }
            };
            let (dx, dscale, dshift, plus) = backward(of(&dy));
            if added {
                // A gradient in two parts is their sum.
                let bits = |(dx, dscale, dshift, plus): (Tensor, Tensor, Tensor, Tensor)| {
                    [dx, dscale, dshift, plus].map(|tensor| tensor.to_f32())
                };
                let more = values(seed + 5, rows * c, 1.0);
                let sum = add(&of(&dy), &of(&more)).unwrap();
                let held = of(&more);
                assert_eq!(bits(in_parts(of(&dy), Some(of(&more)))), bits(in_parts(sum.clone(), None)));
                assert_eq!(bits(in_parts(held.clone(), Some(of(&dy)))), bits(in_parts(sum, None)));
                assert_eq!(held.to_f32(), of(&more).to_f32());
            } else {
                let (again, _, _, remade) =
                    backward_remaking(of(&dy), &x, [&scale, &shift], [&mean, &rstd]).unwrap();
                assert_eq!((again.to_f32(), remade.to_f32()), (dx.to_f32(), y.to_f32()));
            }
            let remade = remake(&x, [&scale, &shift], [&mean, &rstd], epilogue).unwrap();
            assert_eq!(remade.to_f32(), y.to_f32());
            // A dy that others hold stays as it was.
            let held = of(&dy);
            let (other, ..) = backward(held.clone());
            assert_eq!((other.to_f32(), held.to_f32()), (dx.to_f32(), of(&dy).to_f32()));
            [y, again, dx, dscale, dshift].into_iter().chain(plus).collect()
        });
    }
}

/// Shards of a batch that add up their sums give what the full batch gives.
#[test]
fn shards_of_a_batch_are_normalised_as_the_full_batch() {
    let (rows, c) = (700, 70);
    let x: Vec<f32> = values(1, rows * c, 1.0).iter().map(|x| x + 3.0).collect();
    let dy = values(2, rows * c, 1.0);
    let [scale, shift] = [3, 4].map(|seed| values(seed, c, 1.0));
    let on = |[device, ..]: &[Device; 3]| [DType::F32, DType::Bf16].map(|dtype| (device.clone(), dtype));
    for (device, dtype) in devices().iter().flat_map(on) {
        let channels = |data: &[f32]| tensor(&device, dtype, &[c], data);
        let (scale, shift) = (channels(&scale), channels(&shift));
        let rows_of = |data: &[f32], rows: std::ops::Range<usize>| {
            tensor(&device, dtype, &[rows.len(), c], &data[rows.start * c..rows.end * c])
        };
        // Uneven shards, as a tiled image has them; each adds its numbers to what the others brought.
        let row_ranges = [0..1, 1..300, 300..rows];
        let add = |sums: Vec<Vec<f64>>| -> Vec<f64> {
            (0..2 * c + 1).map(|k| sums.iter().map(|sums| sums[k]).sum()).collect()
        };
        let all = add(row_ranges
            .iter()
            .map(|at| ChannelMoments::of(&rows_of(&x, at.clone())).unwrap().to_sums())
            .collect());
        let full = rows_of(&x, 0..rows);
        let (y, mean, rstd) = forward(&full, &scale, &shift, EPS, NormEpilogue::default()).unwrap();
        let (dx, dscale, dshift) = backward(&rows_of(&dy, 0..rows), &full, &scale, &mean, &rstd).unwrap();
        let brought = |at: &std::ops::Range<usize>| {
            measure_gradient(&rows_of(&dy, at.clone()), &rows_of(&x, at.clone()), &mean).unwrap()
        };
        let back = add(row_ranges.iter().map(brought).collect());

        let (mut ys, mut dxs, mut dscales, mut dshifts) = (vec![], vec![], vec![0.0; c], vec![0.0; c]);
        for at in row_ranges {
            let (x, dy) = (rows_of(&x, at.clone()), rows_of(&dy, at.clone()));
            let count = measure(&x).unwrap()[2 * c] as usize;
            let (y, m, r, n) = normalise(&x, &scale, &shift, EPS, &all, NormEpilogue::default()).unwrap();
            assert_eq!((count, n), (at.len(), rows));
            assert_close(&m.to_f32(), &wide(&mean.to_f32()), 1e-6);
            assert_close(&r.to_f32(), &wide(&rstd.to_f32()), 1e-6);
            let local = measure_gradient(&dy, &x, &m).unwrap();
            let dx = input_gradient(&dy, &x, &scale, &m, &r, &back).unwrap();
            let (dscale, dshift) = scale_and_shift(&scale, &r, &local).unwrap();
            ys.extend(y.to_f32());
            dxs.extend(dx.to_f32());
            dscales.iter_mut().zip(dscale.to_f32()).for_each(|(sum, rows_of)| *sum += rows_of);
            dshifts.iter_mut().zip(dshift.to_f32()).for_each(|(sum, rows_of)| *sum += rows_of);
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
        let (_, m, r) = forward(&x, &one, &one, EPS, NormEpilogue::default()).unwrap();
        assert_close(&m.to_f32(), &mean, 1e-7);
        assert_close(&r.to_f32(), &rstd, 1e-5);
    }
}

/// To the bit what the two give one after the other, windows past the image and odd channels included;
/// backwards but for the rounding of the gradient between them.
#[test]
fn a_pool_behind_a_norm_reads_what_the_norm_would_give() {
    for (kernel, stride, c) in [(3, 2, 8), (2, 2, 16), (3, 2, 5), (4, 3, 8)] {
        let (pool, shape) = (PoolParams { kernel, stride, padding: 1.into() }, [3, 9, 10, c]);
        let x = values(1, shape.iter().product(), 1.0);
        let (scale, shift) = (values(2, c, 1.0), values(3, c, 1.0));
        for (device, dtype) in devices().iter().flat_map(|d| [(&d[1], DType::F32), (&d[1], DType::Bf16)]) {
            let x = tensor(device, dtype, &shape, &x);
            let [scale, shift] = [&scale, &shift].map(|data| tensor(device, dtype, &[c], data));
            for relu in [false, true] {
                let (y, places, [mean, rstd]) = forward_max(&x, [&scale, &shift], EPS, pool, relu).unwrap();
                let (normed, own_mean, own_rstd) =
                    forward(&x, &scale, &shift, EPS, NormEpilogue::default()).unwrap();
                let (own_y, own_places) = pool::max_forward(&normed, pool, relu).unwrap();
                let bytes = |tensors: [&Tensor; 4]| tensors.map(|tensor| tensor.host_bytes().into_owned());
                assert_eq!(
                    bytes([&y, &places, &mean, &rstd]),
                    bytes([&own_y, &own_places, &own_mean, &own_rstd]),
                    "{pool:?}, {dtype:?}"
                );
                let dy = tensor(device, dtype, y.shape(), &values(4, y.len(), 1.0));
                let (dx, dscale, dshift) =
                    backward_max(&dy, &places, pool, &x, &scale, [&mean, &rstd]).unwrap();
                let between = pool::max_backward(&dy, &places, pool, &shape).unwrap();
                let (own_dx, own_dscale, own_dshift) = backward(&between, &x, &scale, &mean, &rstd).unwrap();
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
                for (got, own) in [(dx, own_dx), (dscale, own_dscale), (dshift, own_dshift)] {
                    assert_close(&got.to_f32(), &wide(&own.to_f32()), tolerance);
                }
            }
        }
    }
}
