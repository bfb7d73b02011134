//! One micro-batch through the model and back.

use espalier_tensor::ops::cross_entropy::{Summed, Total};
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;
use crate::data::{Batch, Dataset, HostBatch, Split};
use crate::layers::{Backward, BatchStatistics, Forward, GradientSink, Mode, Outcome, Scale, Share, Stash};
use crate::model::Model;
use crate::weights::Weights;

/// What a pass reads.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a> {
    /// The layers.
    pub model: &'a Model,
    /// Their weights.
    pub weights: &'a Weights,
    /// Where samples come from.
    pub dataset: &'a Dataset,
    /// Where it runs.
    pub device: &'a Device,
    /// The type that kernels compute in.
    pub dtype: DType,
}

/// What a loss is, beside its data.
#[derive(Debug, Clone, Copy)]
pub struct Loss {
    /// The key of the random numbers.
    pub random: u64,
    /// Samples of all micro-batches together: each weighs by its share, so that their sum is the gradient of the mean.
    pub samples: usize,
    /// The logits are divided by this; 1 in training.
    pub temperature: f32,
}

/// What came of one or more passes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// The sum of the losses of all predictions.
    pub loss_sum: f64,
    /// Right predictions.
    pub correct: usize,
    /// All predictions.
    pub predictions: usize,
}

impl Totals {
    /// Of one micro-batch.
    pub(crate) fn of(total: Total, predictions: usize) -> Totals {
        Totals { loss_sum: total.loss_sum, correct: total.correct, predictions }
    }

    /// The mean loss.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.predictions as f64
    }

    /// The share of right predictions.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.predictions as f64
    }

    /// Takes in another's.
    pub fn add(&mut self, other: Totals) {
        self.loss_sum += other.loss_sum;
        self.correct += other.correct;
        self.predictions += other.predictions;
    }
}

impl Pass<'_> {
    /// Training samples forward and backward: their gradients go to the sink, what batch norm saw to `statistics`.
    pub fn train(
        &self,
        samples: &[(u64, usize)],
        loss: Loss,
        statistics: &mut Vec<BatchStatistics>,
        sink: &mut dyn GradientSink,
    ) -> Result<Totals> {
        let alone = Share { samples: samples.len(), ..Share::default() };
        self.train_share(samples, loss, &alone, statistics, sink)
    }

    /// The same for samples that are a share of a step's.
    pub fn train_share(
        &self,
        samples: &[(u64, usize)],
        loss: Loss,
        share: &Share,
        statistics: &mut Vec<BatchStatistics>,
        sink: &mut dyn GradientSink,
    ) -> Result<Totals> {
        let host = self.dataset.batch(Split::Train, samples)?;
        let (inputs, targets) = self.upload(&host)?;
        let batch = Batch { inputs, targets };
        let (total, predictions) = self.train_batch(batch, samples.len(), loss, share, statistics, sink)?;
        Ok(Totals::of(total.read()?, predictions))
    }

    /// The same for a batch of so many samples that is on the device. Returns sums that are yet to be read and the number of
    /// predictions: nothing here waits for a card.
    pub fn train_batch(
        &self,
        batch: Batch,
        samples: usize,
        loss: Loss,
        share: &Share,
        statistics: &mut Vec<BatchStatistics>,
        sink: &mut dyn GradientSink,
    ) -> Result<(Summed, usize)> {
        let Batch { inputs, targets } = batch;
        let (mut stash, random) = (Stash::new(), loss.random);
        let mut pass = Forward {
            weights: self.weights,
            mode: Mode::Train,
            random,
            share,
            stash: &mut stash,
            statistics,
        };
        let x = self.model.forward(inputs, &mut pass)?;
        let predictions = targets.len();
        let all = predictions / samples * loss.samples;
        let scale = Scale { loss: 1.0 / all as f32, temperature: loss.temperature };
        let mut pass = Backward { weights: self.weights, random, share, stash: &mut stash, sink };
        let Outcome { total, gradient } = self.model.loss(x, &targets, scale, &mut pass)?;
        self.model.backward(gradient, &mut pass)?;
        Ok((total, predictions))
    }

    /// Validation samples forward.
    pub fn evaluate(&self, samples: &[(u64, usize)]) -> Result<Totals> {
        let host = self.dataset.batch(Split::Validation, samples)?;
        let (input, targets) = self.upload(&host)?;
        let mut pass = Forward {
            weights: self.weights,
            mode: Mode::Evaluate,
            random: 0,
            share: &Share::default(),
            stash: &mut Stash::forgetful(),
            statistics: &mut Vec::new(),
        };
        let x = self.model.forward(input, &mut pass)?;
        let total = self.model.evaluate(&x, &targets, self.weights)?;
        Ok(Totals::of(total, host.targets.len()))
    }

    /// Copies a batch to the device.
    fn upload(&self, host: &HostBatch) -> Result<(Tensor, Tensor)> {
        let targets =
            Tensor::from_slice(self.device, &[host.targets.len()], &host.targets, Category::Activations)?;
        Ok((host.inputs.upload(self.device, self.dtype)?, targets))
    }
}
