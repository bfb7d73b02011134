//! What a loss is beside its data, and what came of passes.

use espalier_nn::layers::LossScaling;
use espalier_tensor::ops::cross_entropy::LossTotal;

use crate::Result;
use crate::parallel::Ranks;

/// What a loss is, beside its data.
#[derive(Debug, Clone, Copy)]
pub struct LossConfig {
    /// The key of the random numbers.
    pub random: u64,
    /// Samples of all micro-batches together: each weighs by its fraction of them, so that their sum is the
    /// gradient of the mean.
    pub samples: usize,
    /// Targets of these samples that do not count: what is left is what the loss is the mean of.
    pub ignored: usize,
    /// The logits are divided by this; 1 in training.
    pub temperature: f32,
}

impl LossConfig {
    /// What it is for `samples` samples with so many predictions.
    pub(super) fn scale(&self, predictions: usize, samples: usize) -> LossScaling {
        let all = predictions / samples * self.samples - self.ignored;
        LossScaling { loss: 1.0 / all as f32, temperature: self.temperature }
    }
}

/// What came of one or more passes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// The sum of the losses of all predictions.
    pub loss_sum: f64,
    pub correct: usize,
    pub predictions: usize,
}

impl Totals {
    /// Those of one micro-batch.
    pub(super) fn of(total: LossTotal, predictions: usize) -> Totals {
        Totals { loss_sum: total.loss_sum, correct: total.correct, predictions }
    }

    /// What came of the passes of all ranks, from this one's.
    pub(crate) fn of_all(self, ranks: &Ranks) -> Result<Totals> {
        let counted = if ranks.counts_losses() { self } else { Totals::default() };
        Ok(Totals::from_numbers(&ranks.all_reduce_sum(counted.to_numbers())?))
    }

    /// As plain numbers, to be added up over ranks.
    pub(crate) fn to_numbers(self) -> Vec<f64> {
        vec![self.loss_sum, self.correct as f64, self.predictions as f64]
    }

    /// Back from the numbers that ranks add up.
    pub(crate) fn from_numbers(numbers: &[f64]) -> Totals {
        Totals { loss_sum: numbers[0], correct: numbers[1] as usize, predictions: numbers[2] as usize }
    }

    /// The mean loss.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.predictions as f64
    }

    /// The fraction of right predictions.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.predictions as f64
    }

    /// Adds those of another micro-batch or rank.
    pub fn add(&mut self, other: Totals) {
        self.loss_sum += other.loss_sum;
        self.correct += other.correct;
        self.predictions += other.predictions;
    }
}
