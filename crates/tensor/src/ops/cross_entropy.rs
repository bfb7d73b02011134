//! Softmax and cross-entropy together. logits: `[rows, v]`; targets: u32 `[rows]`.
//!
//! - loss of a row = log(sum exp(x - max)) + max - x_target
//! - gradient = scale (softmax(x) - onehot(target))
//!
//! A row whose target is [`IGNORED`] is worth nothing, and its gradient is zero.
//!
//! The logits of all rows are the largest tensor of a language model. So they come a few rows at a time, and
//! the gradient takes their place: a row is read for its maximum, read for its sum and then overwritten, all
//! while it is in the cache.

pub(crate) mod cuda;
mod split;

use crate::cpu::{lanes, math};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::ops::chunks;
use crate::tensor::Tensor;
use crate::{simd, with_float};

pub use split::NUMBERS;

/// The target of a row that does not count: where a batch is longer than what there is to predict, or where what
/// follows is not to be learnt.
pub const IGNORED: u32 = u32::MAX;

/// The losses of a batch's rows, taken a few rows at a time, from the first to the last.
#[derive(Debug)]
pub struct LossAccumulator {
    targets: Tensor,
    /// Rows that have come.
    done: usize,
    found: RowResults,
}

/// What has been found out about the rows that have come.
#[derive(Debug)]
enum RowResults {
    /// Sums over chunks of rows, in their order.
    Host(Vec<LossTotal>),
    /// Row by row, where they wait to be summed up.
    Gpu(cuda::RowLosses),
}

/// What a batch of predictions was worth.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LossTotal {
    /// The sum of the rows' losses, in nats.
    pub loss_sum: f64,
    /// Rows whose largest logit is the target's; of equal ones the first counts.
    pub correct: usize,
}

/// The sums over a batch's rows, wherever they are.
#[derive(Debug, Clone)]
pub enum BatchLoss {
    /// On the host: there already.
    Host(LossTotal),
    /// On a GPU, which may still be at work on them.
    Gpu(Tensor),
}

impl BatchLoss {
    /// The sums on the host. On a GPU this waits for all work that is queued by now: so it is best done last.
    pub fn read(&self) -> Result<LossTotal> {
        match self {
            BatchLoss::Host(total) => Ok(*total),
            BatchLoss::Gpu(sums) => cuda::read(sums),
        }
    }
}

impl LossAccumulator {
    /// For rows with these targets.
    pub fn new(targets: &Tensor) -> Result<LossAccumulator> {
        assert_eq!(targets.dtype(), DType::U32, "cross_entropy: targets");
        let found = match targets.device() {
            Device::Cpu(_) => RowResults::Host(Vec::new()),
            Device::Cuda(_) => RowResults::Gpu(cuda::RowLosses::new(targets)?),
        };
        Ok(LossAccumulator { targets: targets.clone(), done: 0, found })
    }

    /// Takes the logits of the next rows; returns the gradient of `scale` times their loss, in the logits'
    /// place if nobody else holds them. A target beyond the classes panics on the host and is a loss of NaN
    /// on a GPU.
    pub fn differentiate(&mut self, logits: Tensor, scale: f32) -> Result<Tensor> {
        let mut logits = chunks::writable(logits)?;
        let (at, v) = (self.next(&logits), logits.width());
        match (logits.device(), &mut self.found) {
            (Device::Cpu(cpu), RowResults::Host(found)) => {
                let targets = &self.targets.slice::<u32>()[at];
                let chunk = chunks::rows(v);
                let mut partial = vec![LossTotal::default(); targets.len().div_ceil(chunk)];
                with_float!(logits.dtype(), T => {
                    let parts = logits.slice_mut::<T>().chunks_mut(chunk * v).zip(targets.chunks(chunk));
                    chunks::each(&cpu, parts.zip(&mut partial), |((logits, targets), partial)| {
                        *partial = differentiate(cpu.isa(), logits, targets, scale)
                    });
                });
                found.extend(partial);
            }
            (Device::Cuda(cuda), RowResults::Gpu(found)) => {
                found.differentiate(&cuda, &mut logits, &self.targets, at.start, scale)?;
            }
            _ => panic!("cross_entropy: logits and targets are on two devices"),
        }
        Ok(logits)
    }

    /// As [`LossAccumulator::differentiate`], without the gradient; rows whose target is [`IGNORED`] count
    /// for nothing.
    pub fn measure(&mut self, logits: &Tensor) -> Result<()> {
        let (at, v) = (self.next(logits), logits.width());
        match (logits.device(), &mut self.found) {
            (Device::Cpu(cpu), RowResults::Host(found)) => with_float!(logits.dtype(), T => {
                let (logits, targets) = (logits.slice::<T>(), &self.targets.slice::<u32>()[at]);
                found.extend(cpu.map_chunks(targets.len(), chunks::rows(v), |at| {
                    measure(cpu.isa(), &logits[at.start * v..at.end * v], &targets[at])
                }));
            }),
            (Device::Cuda(cuda), RowResults::Gpu(found)) => {
                found.measure(&cuda, logits, &self.targets, at.start)?;
            }
            _ => panic!("cross_entropy: logits and targets are on two devices"),
        }
        Ok(())
    }

    /// The sums over all rows, which must all have come. On a GPU this waits for all queued work, as they go to
    /// the host.
    pub fn total(self) -> Result<LossTotal> {
        self.sum()?.read()
    }

    /// The same, to be read later: nothing is waited for yet.
    pub fn sum(self) -> Result<BatchLoss> {
        assert_eq!(self.done, self.targets.len(), "cross_entropy: rows without logits");
        match self.found {
            RowResults::Host(found) => {
                Ok(BatchLoss::Host(found.iter().fold(LossTotal::default(), |sum, part| LossTotal {
                    loss_sum: sum.loss_sum + part.loss_sum,
                    correct: sum.correct + part.correct,
                })))
            }
            RowResults::Gpu(found) => found.sum().map(BatchLoss::Gpu),
        }
    }

    /// The rows that `logits` are of.
    fn next(&mut self, logits: &Tensor) -> std::ops::Range<usize> {
        let at = self.done..self.done + logits.rows();
        assert!(
            at.end <= self.targets.len(),
            "cross_entropy: logits {:?} from row {}",
            logits.shape(),
            at.start
        );
        self.done = at.end;
        at
    }
}

simd! {
    fn differentiate[T: Float](logits: &mut [T], targets: &[u32], scale: f32) -> LossTotal {
        let (mut loss_sum, mut correct) = (0.0, 0);
        for (x, &target) in logits.chunks_exact_mut(logits.len() / targets.len()).zip(targets) {
            if target == IGNORED {
                x.fill(T::from_f32(0.0));
                continue;
            }
            let target = target as usize;
            let row = row(x, target);
            loss_sum += row.loss;
            correct += usize::from(row.correct);
            let share = scale / row.sum as f32;
            let at_target = math::exp(x[target].to_f32() - row.max) * share - scale;
            for x in x.iter_mut() {
                *x = T::from_f32(math::exp(x.to_f32() - row.max) * share);
            }
            x[target] = T::from_f32(at_target);
        }
        LossTotal { loss_sum, correct }
    }

    fn measure[T: Float](logits: &[T], targets: &[u32]) -> LossTotal {
        let (mut loss_sum, mut correct) = (0.0, 0);
        let rows = logits.chunks_exact(logits.len() / targets.len()).zip(targets);
        for (x, &target) in rows.filter(|(_, target)| **target != IGNORED) {
            let row = row(x, target as usize);
            loss_sum += row.loss;
            correct += usize::from(row.correct);
        }
        LossTotal { loss_sum, correct }
    }
}

struct RowLoss {
    max: f32,
    sum: f64,
    loss: f64,
    correct: bool,
}

/// The numbers of one row. NaNs do not reach the maximum but do reach the sum, and with it the loss.
#[inline(always)]
fn row<T: Float>(x: &[T], target: usize) -> RowLoss {
    assert!(target < x.len(), "cross_entropy: target {target} among {} classes", x.len());
    let max = lanes::max(x);
    let sum = lanes::sum_exp(x, max);
    let logit = x[target].to_f32();
    RowLoss {
        max,
        sum,
        loss: math::ln(sum) + (f64::from(max) - f64::from(logit)),
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

    /// All rows at once: the gradient and the sums.
    fn differentiate(logits: Tensor, targets: &Tensor, scale: f32) -> (Tensor, LossTotal) {
        let mut losses = LossAccumulator::new(targets).unwrap();
        let gradient = losses.differentiate(logits, scale).unwrap();
        (gradient, losses.total().unwrap())
    }

    fn measure(logits: &Tensor, targets: &Tensor) -> LossTotal {
        let mut losses = LossAccumulator::new(targets).unwrap();
        losses.measure(logits).unwrap();
        losses.total().unwrap()
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
                let measured = measure(&logits, &targets);
                let place = address(&logits);
                let (gradient, total) = differentiate(logits, &targets, scale);
                assert_eq!(measured, total);
                assert_eq!(total.correct, right);
                assert_eq!(address(&gradient), place);
                let loss = tensor(device, DType::F32, &[1], &[total.loss_sum as f32]);
                vec![gradient, loss]
            });
        }

        /// In chunks: the same gradient, row by row, and the same sums but for the order of the host's additions.
        #[test]
        fn rows_may_come_in_chunks(rows in 2usize..300, v in 1usize..200, part in 1usize..150, seed: u64) {
            let (x, targets) = (values(seed, rows * v, 3.0), integers(seed, rows, v));
            for device in devices().iter().map(|threads| &threads[0]) {
                let targets = indices(device, &[rows], &targets);
                let whole = differentiate(tensor(device, DType::F32, &[rows, v], &x), &targets, 0.5);
                let (mut taken, mut measured) = (LossAccumulator::new(&targets).unwrap(), LossAccumulator::new(&targets).unwrap());
                let gradients = x.chunks(part * v).flat_map(|x| {
                    let logits = tensor(device, DType::F32, &[x.len() / v, v], x);
                    measured.measure(&logits).unwrap();
                    taken.differentiate(logits, 0.5).unwrap().to_f32()
                });
                assert_eq!(gradients.collect::<Vec<_>>(), whole.0.to_f32());
                let (taken, measured) = (taken.total().unwrap(), measured.total().unwrap());
                assert_eq!(taken, measured);
                assert_eq!(taken.correct, whole.1.correct);
                assert_close(&[taken.loss_sum as f32], &[whole.1.loss_sum], 1e-6);
            }
        }
    }

    /// Rows that do not count, for the loss of the others and for their gradient, in both types.
    #[test]
    fn ignored_rows_have_no_gradient() {
        let (rows, v) = (9, 33);
        let (x, classes) = (values(4, rows * v, 3.0), integers(6, rows, v));
        let ignores = |row: usize| row % 3 != 1;
        let targets: Vec<u32> = classes
            .iter()
            .enumerate()
            .map(|(row, &class)| if ignores(row) { IGNORED } else { class })
            .collect();
        for [device, ..] in devices() {
            for dtype in [DType::F32, DType::Bf16] {
                let of = |targets: &[u32]| {
                    let logits = tensor(device, dtype, &[rows, v], &x);
                    differentiate(logits, &indices(device, &[rows], targets), 0.5)
                };
                let (all, (some, total)) = (of(&classes).0.to_f32(), of(&targets));
                for (row, (some, all)) in some.to_f32().chunks(v).zip(all.chunks(v)).enumerate() {
                    assert!(
                        if ignores(row) { some.iter().all(|x| *x == 0.0) } else { some == all },
                        "row {row}"
                    );
                }
                let measured =
                    measure(&tensor(device, dtype, &[rows, v], &x), &indices(device, &[rows], &targets));
                assert_eq!(measured, total);
            }
        }
    }

    #[test]
    fn logits_that_somebody_holds_stay_as_they_are() {
        for [device, ..] in devices() {
            let logits = tensor(device, DType::F32, &[1, 2], &[1.0, 1.0]);
            let (gradient, _) = differentiate(logits.clone(), &indices(device, &[1], &[0]), 1.0);
            assert_eq!((logits.to_f32(), gradient.to_f32()), (vec![1.0, 1.0], vec![-0.5, 0.5]));
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
                let (gradient, total) = differentiate(logits, &indices(device, &[1], &[77]), 1.0);
                assert_close(&[total.loss_sum as f32], &[expected], 1e-5);
                let gradient = gradient.to_f32();
                assert!(gradient.iter().sum::<f32>().abs() < 1e-4 && gradient.iter().all(|g| g.abs() <= 1.0));
            }
        }
    }

    /// Rows of which a GPU keeps a part beside the arithmetic, and rows that it cannot read in groups.
    #[test]
    fn the_vocabulary_of_a_language_model() {
        for v in [50_257, 50_304, 8_192] {
            let (rows, classes) = (3, integers(5, 3, v));
            let x = values(12, rows * v, 3.0);
            check_like_host(|device, dtype| {
                let logits = tensor(device, dtype, &[rows, v], &x);
                let targets = indices(device, &[rows], &classes);
                let measured = measure(&logits, &targets);
                let (gradient, total) = differentiate(logits, &targets, 1.0);
                assert_eq!(measured, total);
                let numbers = [total.loss_sum as f32, total.correct as f32];
                vec![gradient, tensor(device, DType::F32, &[2], &numbers)]
            });
        }
    }

    #[test]
    fn broken_logits_show_in_the_loss() {
        for device in devices().iter().map(|threads| &threads[0]) {
            let run = |x: &[f32]| {
                let targets = indices(device, &[1], &[1]);
                differentiate(tensor(device, DType::F32, &[1, x.len()], x), &targets, 1.0).1
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
            assert_eq!(measure(&logits, &indices(device, &[3], &[1, 2, 0])).correct, 2);
        }
    }
}
