//! The loss where the logits are sharded over ranks by classes: two readings with one all-gather of four
//! numbers a row between them, so that no logit is ever sent.
//!
//! The first reading gives, for each row, the largest logit here, the sum of exp(x - largest), the number of
//! its class, and the target's logit, minus infinity where the target is another's. Put together in the order
//! of classes, they say what the second reading needs: the maximum and the sum over all classes.

use std::ops::Range;

use super::{IGNORED, LossAccumulator, LossTotal, RowResults};
use crate::cpu::{lanes, math};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks;
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// Numbers that a row has of each rank: largest, sum, class, target.
pub const NUMBERS: usize = 4;

impl LossAccumulator {
    /// The first reading of the next rows, whose logits are those of some `classes`: f32 `[rows, 4]`. Logits
    /// behind them are padding, of minus infinity. They are taken by [`LossAccumulator::differentiate_shard`]
    /// or [`LossAccumulator::measure_shard`].
    pub fn read_shard(&self, logits: &Tensor, classes: &Range<usize>) -> Result<Tensor> {
        assert!(classes.end < 1 << 24, "cross_entropy: the number of a class is told as an f32");
        let (rows, v) = (logits.rows(), logits.width());
        let mut numbers = Tensor::empty(&logits.device(), &[rows, NUMBERS], DType::F32, Category::Workspace)?;
        let at = self.done..self.done + rows;
        match logits.device() {
            Device::Cpu(cpu) => with_float!(logits.dtype(), T => {
                let (x, targets) = (logits.slice::<T>(), &self.targets.slice::<u32>()[at]);
                let chunk = chunks::rows(v);
                let shards = numbers.slice_mut::<f32>().chunks_mut(chunk * NUMBERS).zip(x.chunks(chunk * v));
                chunks::each(&cpu, shards.zip(targets.chunks(chunk)), |((numbers, x), targets)| {
                    read(cpu.isa(), x, targets, numbers, classes.start, classes.len())
                });
            }),
            Device::Cuda(cuda) => {
                super::cuda::read_shard(&cuda, logits, &self.targets, at.start, classes, &mut numbers)?;
            }
        }
        Ok(numbers)
    }

    /// The second reading of the next rows: the gradient of `scale` times their loss, in the logits' place if
    /// nobody else holds them. `all` is what all ranks have read, `[ranks, rows, 4]`, in the order of
    /// classes.
    pub fn differentiate_shard(
        &mut self,
        logits: Tensor,
        classes: &Range<usize>,
        all: &Tensor,
        scale: f32,
    ) -> Result<Tensor> {
        let mut logits = chunks::writable(logits)?;
        let (at, v) = (self.next(&logits), logits.width());
        match (logits.device(), &mut self.found) {
            (Device::Cpu(cpu), RowResults::Host(found)) => {
                let targets = &self.targets.slice::<u32>()[at];
                let (joined, total) = join(all.slice::<f32>(), targets);
                with_float!(logits.dtype(), T => {
                    let chunk = chunks::rows(v);
                    let shards = logits.slice_mut::<T>().chunks_mut(chunk * v).zip(joined.chunks(chunk));
                    chunks::each(&cpu, shards.zip(targets.chunks(chunk)), |((x, joined), targets)| {
                        for ((x, &[max, sum]), &target) in x.chunks_exact_mut(v).zip(joined).zip(targets) {
                            if target == IGNORED {
                                x.fill(T::from_f32(0.0));
                                continue;
                            }
                            gradient(cpu.isa(), x, max, scale / sum, local_class(target, classes), scale);
                        }
                    });
                });
                found.push(total);
            }
            (Device::Cuda(cuda), RowResults::Gpu(found)) => {
                found.join(&cuda, &self.targets, at.start, all)?;
                super::cuda::differentiate_shard(
                    &cuda,
                    &mut logits,
                    &self.targets,
                    at.start,
                    classes,
                    all,
                    scale,
                )?;
            }
            _ => panic!("cross_entropy: logits and targets are on two devices"),
        }
        Ok(logits)
    }

    /// The same without the gradient; no second reading is needed.
    pub fn measure_shard(&mut self, logits: &Tensor, all: &Tensor) -> Result<()> {
        let at = self.next(logits);
        match (logits.device(), &mut self.found) {
            (Device::Cpu(_), RowResults::Host(found)) => {
                found.push(join(all.slice::<f32>(), &self.targets.slice::<u32>()[at]).1);
            }
            (Device::Cuda(cuda), RowResults::Gpu(found)) => {
                found.join(&cuda, &self.targets, at.start, all)?
            }
            _ => panic!("cross_entropy: logits and targets are on two devices"),
        }
        Ok(())
    }
}

/// A target's index among some classes.
fn local_class(target: u32, classes: &Range<usize>) -> Option<usize> {
    classes.contains(&(target as usize)).then(|| target as usize - classes.start)
}

/// The maximum and the sum of each row over all ranks, and the loss of the rows.
fn join(all: &[f32], targets: &[u32]) -> (Vec<[f32; 2]>, LossTotal) {
    let rows = targets.len();
    let ranks = all.len() / (NUMBERS * rows).max(1);
    let mut total = LossTotal::default();
    let joined = (0..rows).map(|row| {
        let of = |rank: usize| &all[(rank * rows + row) * NUMBERS..][..NUMBERS];
        let max = (0..ranks).fold(f32::NEG_INFINITY, |max, rank| max.max(of(rank)[0]));
        let sum: f64 =
            (0..ranks).map(|rank| f64::from(of(rank)[1]) * f64::from(of(rank)[0] - max).exp()).sum();
        let logit = (0..ranks).fold(f32::NEG_INFINITY, |logit, rank| logit.max(of(rank)[3]));
        let first = (0..ranks).find(|rank| of(*rank)[0] == max).map(|rank| of(rank)[2]);
        if targets[row] != IGNORED {
            total.loss_sum += math::ln(sum) + (f64::from(max) - f64::from(logit));
            total.correct += usize::from(first == Some(targets[row] as f32));
        }
        [max, sum as f32]
    });
    (joined.collect(), total)
}

simd! {
    fn read[T: Float](x: &[T], targets: &[u32], numbers: &mut [f32], first: usize, classes: usize) {
        let v = x.len() / targets.len();
        for ((x, &target), numbers) in x.chunks_exact(v).zip(targets).zip(numbers.chunks_exact_mut(NUMBERS)) {
            let max = lanes::max(x);
            let sum = lanes::sum_exp(x, max) as f32;
            let class = x.iter().position(|x| x.to_f32() == max).unwrap_or(0);
            let logit = (target as usize).checked_sub(first).filter(|at| *at < classes).map(|at| x[at].to_f32());
            numbers.copy_from_slice(&[max, sum, (first + class) as f32, logit.unwrap_or(f32::NEG_INFINITY)]);
        }
    }

    fn gradient[T: Float](x: &mut [T], max: f32, inv_sum: f32, local_class: Option<usize>, scale: f32) -> () {
        let at_target = local_class.map(|at| math::exp(x[at].to_f32() - max) * inv_sum - scale);
        for x in x.iter_mut() {
            *x = T::from_f32(math::exp(x.to_f32() - max) * inv_sum);
        }
        if let (Some(local_class), Some(at_target)) = (local_class, at_target) {
            x[local_class] = T::from_f32(at_target);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ops::columns;
    use crate::testing::{assert_close, devices, indices, integers, tensor, values};

    /// The numbers of all ranks, one after the other, as an all-gather gives them.
    fn gathered(shards: &[Tensor]) -> Tensor {
        let numbers: Vec<f32> = shards.iter().flat_map(|shard| shard.to_f32()).collect();
        let shape = [shards.len(), shards[0].rows(), NUMBERS];
        Tensor::from_slice(&shards[0].device(), &shape, &numbers, Category::Workspace).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        /// Any split of the classes gives the loss, the correct predictions and the gradient of all of them
        /// on one rank.
        #[test]
        fn shards_of_the_classes_give_what_all_give(
            rows in 1usize..9, v in 3usize..700, ranks in 2usize..4, coarse: bool, padding in 0usize..9, seed: u64,
        ) {
            // Few different values: many largest ones.
            let spread = if coarse { 2.0 } else { 100.0 };
            let logits: Vec<f32> = values(seed, rows * v, 2.0).iter().map(|x| (x * spread).round() / spread).collect();
            let target = integers(seed ^ 1, rows, v);
            for device in devices().iter().flatten() {
                let targets = indices(device, &[rows], &target);
                let all = tensor(device, DType::F32, &[rows, v], &logits);
                let mut unsharded = LossAccumulator::new(&targets).unwrap();
                let expected = unsharded.differentiate(all.clone(), 0.5).unwrap().to_f32();
                let expected_total = unsharded.total().unwrap();
                let class_ranges: Vec<Range<usize>> = (0..ranks).map(|rank| v * rank / ranks..v * (rank + 1) / ranks).collect();
                let shards: Vec<Tensor> = class_ranges.iter().map(|at| {
                    let shard = columns::take(&all, at.clone(), Category::Workspace).unwrap().to_f32();
                    let padded = shard.chunks(at.len()).flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(f32::NEG_INFINITY, padding)));
                    tensor(device, DType::F32, &[rows, at.len() + padding], &padded.collect::<Vec<_>>())
                }).collect();
                let losses = || LossAccumulator::new(&targets).unwrap();
                let read: Vec<Tensor> = shards.iter().zip(&class_ranges).map(|(shard, at)| losses().read_shard(shard, at).unwrap()).collect();
                let read = gathered(&read);
                // Without its first row the loss of a batch is that of the others.
                let others: Vec<u32> = std::iter::once(IGNORED).chain(target[1..].iter().copied()).collect();
                let others = indices(device, &[rows], &others);
                let (mut measured, mut in_shards) = (LossAccumulator::new(&others).unwrap(), LossAccumulator::new(&others).unwrap());
                measured.measure(&all).unwrap();
                in_shards.measure_shard(&shards[0], &read).unwrap();
                let (measured, in_shards) = (measured.total().unwrap(), in_shards.total().unwrap());
                let mut first = LossAccumulator::new(&indices(device, &[1], &target[..1])).unwrap();
                first.measure(&tensor(device, DType::F32, &[1, v], &logits[..v])).unwrap();
                let first = first.total().unwrap();
                for total in [measured, in_shards] {
                    prop_assert_eq!(total.correct + first.correct, expected_total.correct);
                    prop_assert!((total.loss_sum + first.loss_sum - expected_total.loss_sum).abs() < 1e-5 * expected_total.loss_sum.abs().max(1.0));
                }
                let mut without_first = LossAccumulator::new(&others).unwrap();
                let gradient = without_first.differentiate_shard(shards[0].clone(), &class_ranges[0], &read, 0.5).unwrap().to_f32();
                prop_assert!(gradient[..class_ranges[0].len() + padding].iter().all(|x| *x == 0.0));
                prop_assert!((without_first.total().unwrap().loss_sum - in_shards.loss_sum).abs() < 1e-6 * in_shards.loss_sum.abs().max(1.0));
                for (shard, at) in shards.into_iter().zip(&class_ranges) {
                    let mut measured = losses();
                    measured.measure_shard(&shard, &read).unwrap();
                    let mut losses = losses();
                    let gradient = losses.differentiate_shard(shard, at, &read, 0.5).unwrap().to_f32();
                    for (row, gradient) in gradient.chunks(at.len() + padding).enumerate() {
                        let expected: Vec<f64> = expected[row * v..][at.clone()].iter().map(|x| f64::from(*x)).collect();
                        assert_close(&gradient[..at.len()], &expected, 1e-5);
                        prop_assert!(gradient[at.len()..].iter().all(|x| *x == 0.0));
                    }
                    for total in [losses.total().unwrap(), measured.total().unwrap()] {
                        prop_assert_eq!(total.correct, expected_total.correct);
                        prop_assert!((total.loss_sum - expected_total.loss_sum).abs() < 1e-5 * expected_total.loss_sum.abs().max(1.0));
                    }
                }
            }
        }
    }
}
