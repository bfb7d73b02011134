//! Softmax and cross-entropy together. logits: `[rows, v]`; targets: u32 `[rows]`.
//!
//! - loss of a row = log(sum exp(x - max)) + max - x_target
//! - gradient = scale (softmax(x) - onehot(target))
//!
//! The logits are the largest tensor of a language model, so the gradient takes their place: a row is read for
//! its maximum, read for its sum and then overwritten, all while it is in the cache.

pub(crate) mod cuda;

use crate::cpu::{lanes, math};
use crate::device::Device;
use crate::dtype::Float;
use crate::error::{Result, must};
use crate::ops::pieces;
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// What a batch of predictions was worth.
#[derive(Debug)]
pub struct Outcome {
    /// The sum of the rows' losses, in nats.
    pub loss_sum: f64,
    /// Rows whose largest logit is the target's; of equal ones the first counts.
    pub correct: usize,
    /// The gradient of `scale` times the loss sum, in the logits' place.
    pub gradient: Tensor,
}

/// The loss, and its gradient in the place of the logits, which nobody else may hold. On a card this waits for
/// all queued work, once, as the loss goes to the host. A target beyond the classes panics on the host and is a
/// loss of NaN on a card.
pub fn forward_backward(mut logits: Tensor, targets: &Tensor, scale: f32) -> Result<Outcome> {
    let (rows, v) = (logits.rows(), logits.width());
    assert_eq!(targets.len(), rows, "cross_entropy: targets for logits {:?}", logits.shape());
    let cpu = match logits.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => {
            let (loss_sum, correct) = cuda::forward_backward(&cuda, &mut logits, targets, scale)?;
            return Ok(Outcome { loss_sum, correct, gradient: logits });
        }
    };
    let targets = targets.slice::<u32>();
    let piece = pieces::rows(v);
    let mut partial = vec![(0.0, 0); rows.div_ceil(piece)];
    with_float!(logits.dtype(), T => {
        let parts = logits.slice_mut::<T>().chunks_mut(piece * v).zip(targets.chunks(piece));
        pieces::each(&cpu, parts.zip(&mut partial), |((logits, targets), partial)| {
            *partial = differentiate(cpu.isa(), logits, targets, scale)
        });
    });
    let (loss_sum, correct) = total(&partial);
    Ok(Outcome { loss_sum, correct, gradient: logits })
}

/// The sum of the losses and the number of correct rows, without a gradient; it waits for a card, too.
pub fn evaluate(logits: &Tensor, targets: &Tensor) -> (f64, usize) {
    let (rows, v) = (logits.rows(), logits.width());
    assert_eq!(targets.len(), rows, "cross_entropy: targets for logits {:?}", logits.shape());
    let cpu = match logits.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return must(cuda::evaluate(&cuda, logits, targets)),
    };
    let targets = targets.slice::<u32>();
    with_float!(logits.dtype(), T => {
        let logits = logits.slice::<T>();
        total(&cpu.map_pieces(rows, pieces::rows(v), |at| {
            measure(cpu.isa(), &logits[at.start * v..at.end * v], &targets[at])
        }))
    })
}

fn total(partial: &[(f64, usize)]) -> (f64, usize) {
    partial.iter().fold((0.0, 0), |(loss, correct), part| (loss + part.0, correct + part.1))
}

simd! {
    fn differentiate[T: Float](logits: &mut [T], targets: &[u32], scale: f32) -> (f64, usize) {
        let (mut loss, mut correct) = (0.0, 0);
        for (x, &target) in logits.chunks_exact_mut(logits.len() / targets.len()).zip(targets) {
            let target = target as usize;
            let row = row(x, target);
            loss += row.loss;
            correct += usize::from(row.correct);
            let share = scale / row.sum as f32;
            let at_target = math::exp(x[target].to_f32() - row.max) * share - scale;
            for x in x.iter_mut() {
                *x = T::from_f32(math::exp(x.to_f32() - row.max) * share);
            }
            x[target] = T::from_f32(at_target);
        }
        (loss, correct)
    }

    fn measure[T: Float](logits: &[T], targets: &[u32]) -> (f64, usize) {
        let (mut loss, mut correct) = (0.0, 0);
        for (x, &target) in logits.chunks_exact(logits.len() / targets.len()).zip(targets) {
            let row = row(x, target as usize);
            loss += row.loss;
            correct += usize::from(row.correct);
        }
        (loss, correct)
    }
}

struct Row {
    max: f32,
    sum: f64,
    loss: f64,
    correct: bool,
}

/// The numbers of one row. NaNs do not reach the maximum but do reach the sum, and with it the loss.
#[inline(always)]
fn row<T: Float>(x: &[T], target: usize) -> Row {
    assert!(target < x.len(), "cross_entropy: target {target} among {} classes", x.len());
    let max = lanes::max(x);
    let sum = lanes::sum_exp(x, max);
    let logit = x[target].to_f32();
    Row {
        max,
        sum,
        loss: sum.ln() + (f64::from(max) - f64::from(logit)),
        correct: logit == max && x[..target].iter().all(|x| x.to_f32() != max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::testing::{
        address, assert_close, check, check_like_host, devices, gradient, indices, integers, tensor, values,
        wide,
    };
    use proptest::prelude::*;

    fn loss(x: &[f64], target: usize) -> f64 {
        let max = x.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
        x.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max - x[target]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn loss_and_gradient_agree_with_the_formula(rows in 1usize..300, v in 1usize..200, seed: u64) {
            let scale = 0.25;
            let (x, targets) = (values(seed, rows * v, 3.0), integers(seed, rows, v));
            let x64 = wide(&x);
            let each = || x64.chunks(v).zip(&targets).map(|(x, &target)| (x, target as usize));
            let losses: f64 = each().map(|(x, target)| loss(x, target)).sum();
            let first_largest = |x: &[f64]| {
                (0..v).fold(0, |best, i| if x[i] > x[best] { i } else { best })
            };
            let right = each().filter(|(x, target)| first_largest(x) == *target).count();
            let slope = each()
                .flat_map(|(x, target)| gradient(x, |x| f64::from(scale) * loss(x, target)))
                .collect();
            check(&[slope, vec![losses]], |device, dtype| {
                let logits = tensor(device, dtype, &[rows, v], &x);
                let targets = indices(device, &[rows], &targets);
                let evaluated = evaluate(&logits, &targets);
                let place = address(&logits);
                let outcome = forward_backward(logits, &targets, scale).unwrap();
                assert_eq!(evaluated, (outcome.loss_sum, outcome.correct));
                assert_eq!(outcome.correct, right);
                assert_eq!(address(&outcome.gradient), place);
                let loss = tensor(device, DType::F32, &[1], &[outcome.loss_sum as f32]);
                vec![outcome.gradient, loss]
            });
        }
    }

    /// A vocabulary longer than a block of the sum, with logits whose exponentials would overflow.
    #[test]
    fn long_rows_and_huge_logits_are_stable() {
        let v = 10_007;
        for (spread, shift) in [(1.0, 0.0), (1.0, 1e4), (1e4, 0.0), (1e4, -1e4)] {
            let x: Vec<f32> = values(11, v, spread).iter().map(|x| x + shift).collect();
            let expected = loss(&wide(&x), 77);
            for device in devices().iter().map(|threads| &threads[0]) {
                let logits = tensor(device, DType::F32, &[1, v], &x);
                let outcome = forward_backward(logits, &indices(device, &[1], &[77]), 1.0).unwrap();
                assert_close(&[outcome.loss_sum as f32], &[expected], 1e-5);
                let gradient = outcome.gradient.to_f32();
                assert!(gradient.iter().sum::<f32>().abs() < 1e-4 && gradient.iter().all(|g| g.abs() <= 1.0));
            }
        }
    }

    /// Rows of which a card keeps a part beside the arithmetic, and rows that it cannot read in groups.
    #[test]
    fn the_vocabulary_of_a_language_model() {
        for v in [50_257, 50_304, 8_192] {
            let (rows, classes) = (3, integers(5, 3, v));
            let x = values(12, rows * v, 3.0);
            check_like_host(|device, dtype| {
                let logits = tensor(device, dtype, &[rows, v], &x);
                let targets = indices(device, &[rows], &classes);
                let (loss, correct) = evaluate(&logits, &targets);
                let outcome = forward_backward(logits, &targets, 1.0).unwrap();
                let numbers = [loss as f32, outcome.loss_sum as f32, correct as f32, outcome.correct as f32];
                vec![outcome.gradient, tensor(device, DType::F32, &[4], &numbers)]
            });
        }
    }

    #[test]
    fn broken_logits_show_in_the_loss() {
        for device in devices().iter().map(|threads| &threads[0]) {
            let run = |x: &[f32]| {
                let targets = indices(device, &[1], &[1]);
                forward_backward(tensor(device, DType::F32, &[1, x.len()], x), &targets, 1.0).unwrap()
            };
            assert!(run(&[0.0, 1.0, f32::NAN]).loss_sum.is_nan());
            assert!(run(&[f32::NAN; 3]).loss_sum.is_nan());
            assert!(!run(&[0.0, 1.0, f32::INFINITY]).loss_sum.is_finite());
            assert_eq!(run(&[0.0, f32::NEG_INFINITY, 0.0]).loss_sum, f64::INFINITY);
            assert!(!run(&[f32::NEG_INFINITY; 3]).loss_sum.is_finite());
        }
    }

    #[test]
    fn of_equal_logits_the_first_is_the_prediction() {
        for [device, ..] in devices() {
            let logits = tensor(device, DType::F32, &[3, 3], &[1.0, 2.0, 2.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0]);
            assert_eq!(evaluate(&logits, &indices(device, &[3], &[1, 2, 0])).1, 2);
        }
    }
}
