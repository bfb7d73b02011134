//! One micro-batch through the model and back, whoever holds the parts of it.

use espalier_comm::Communicator;
use espalier_tensor::ops::cross_entropy::Total;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;
use crate::data::{Dataset, HostBatch, Split};
use crate::layers::{Backward, BatchStatistics, Forward, GradientSink, Mode, Outcome, Scale, Share, Stash};
use crate::stage::Stage;
use crate::weights::Weights;

/// What a pass reads.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a> {
    /// The layers: all, or those of this rank.
    pub stage: &'a Stage,
    /// The ranks that hold the others.
    pub relay: Option<&'a Communicator>,
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

impl Loss {
    /// What it is for `samples` samples with so many predictions.
    pub(crate) fn scale(&self, predictions: usize, samples: usize) -> Scale {
        let all = predictions / samples * self.samples;
        Scale { loss: 1.0 / all as f32, temperature: self.temperature }
    }
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

    /// As plain numbers, to be added up over ranks.
    pub(crate) fn to_numbers(self) -> Vec<f64> {
        vec![self.loss_sum, self.correct as f64, self.predictions as f64]
    }

    /// From such numbers.
    pub(crate) fn from_numbers(numbers: &[f64]) -> Totals {
        Totals { loss_sum: numbers[0], correct: numbers[1] as usize, predictions: numbers[2] as usize }
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
        let predictions = host.targets.len();
        let scale = loss.scale(predictions, samples.len());
        let mut totals = Totals::default();
        // Every copy of the model sees the samples: each holder of a part has its gradients.
        for copy in 0..self.stage.placement().copies() {
            let mut waiting: Vec<(usize, Stash, Option<Tensor>)> = Vec::new();
            let room = |chunk, side| self.stage.room(chunk, side, samples.len(), self.device, self.dtype);
            self.stage.through(copy, self.relay, room, |chunk, input| {
                let (model, mut stash) = (self.stage.model(chunk), Stash::new());
                let x = self.input(input, &host)?;
                let mut pass = Forward {
                    weights: self.weights,
                    mode: Mode::Train,
                    random: loss.random,
                    share,
                    stash: &mut stash,
                    statistics,
                };
                let x = model.forward(x, &mut pass)?;
                let (read, sent) = if model.is_last() { (Some(x), None) } else { (None, Some(x)) };
                waiting.push((chunk, stash, read));
                Ok(sent)
            })?;
            self.stage.back_through(copy, self.relay, room, |chunk, gradient| {
                let (forwarded, mut stash, read) = waiting.pop().expect("a forward pass came before");
                debug_assert_eq!(forwarded, chunk);
                let (model, random) = (self.stage.model(chunk), loss.random);
                let mut pass = Backward { weights: self.weights, random, share, stash: &mut stash, sink };
                let gradient = match read {
                    None => gradient.expect("the next part made it"),
                    Some(x) => {
                        let Outcome { total, gradient } =
                            model.loss(x, &self.targets(&host)?, scale, &mut pass)?;
                        totals = Totals::of(total.read()?, predictions);
                        gradient
                    }
                };
                model.backward(gradient, &mut pass)
            })?;
        }
        Ok(totals)
    }

    /// Validation samples forward; what came of it is known where the model ends.
    pub fn evaluate(&self, samples: &[(u64, usize)]) -> Result<Totals> {
        let host = self.dataset.batch(Split::Validation, samples)?;
        let mut totals = Totals::default();
        let room = |chunk, side| self.stage.room(chunk, side, samples.len(), self.device, self.dtype);
        self.stage.through(0, self.relay, room, |chunk, input| {
            let model = self.stage.model(chunk);
            let x = self.input(input, &host)?;
            let mut pass = Forward {
                weights: self.weights,
                mode: Mode::Evaluate,
                random: 0,
                share: &Share::default(),
                stash: &mut Stash::forgetful(),
                statistics: &mut Vec::new(),
            };
            let x = model.forward(x, &mut pass)?;
            if !model.is_last() {
                return Ok(Some(x));
            }
            let total = model.evaluate(&x, &self.targets(&host)?, self.weights)?;
            totals = Totals::of(total, host.targets.len());
            Ok(None)
        })?;
        Ok(totals)
    }

    /// What a part reads: what the part before made, or samples.
    fn input(&self, made: Option<Tensor>, host: &HostBatch) -> Result<Tensor> {
        made.map_or_else(|| Ok(host.inputs.upload(self.device, self.dtype)?), Ok)
    }

    fn targets(&self, host: &HostBatch) -> Result<Tensor> {
        let len = host.targets.len();
        Ok(Tensor::from_slice(self.device, &[len], &host.targets, Category::Activations)?)
    }
}
