//! One rank that trains: it joins a plan, a data set and a device, and takes steps.
//!
//! A step reads the batch at a position that depends on the step's number alone, sends it through the model in
//! micro-batches, and takes the optimizer's step if every number is finite. Otherwise nothing changes but the count.

use std::time::Instant;

use espalier_plan::Plan;
use espalier_plan::config::{Precision, Recompute};
use espalier_tensor::{Category, DType, Device, Tensor, random};

use crate::Result;
use crate::checkpoint::{Checkpoints, Named, NamedMut, Progress};
use crate::data::{Dataset, HostBatch, Order, Split};
use crate::layers::{Backward, Forward, Mode, Stash};
use crate::model::Model;
use crate::state::{Gradients, NoiseScale, Optimizer};
use crate::weights::Weights;

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    plan: Plan,
    steps: u64,
    device: Device,
    dtype: DType,
    dataset: Dataset,
    order: Order,
    model: Model,
    weights: Weights,
    optimizer: Optimizer,
    noise: NoiseScale,
    progress: Progress,
}

/// What one step did.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// The mean loss over the batch, before the step.
    pub loss: f64,
    /// The share of right predictions in the batch.
    pub accuracy: f64,
    /// The learning rate.
    pub lr: f64,
    /// The norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Whether the weights changed: false where a loss or gradient was not finite.
    pub taken: bool,
    /// The gradient noise scale, where it is measured.
    pub noise_scale: Option<f64>,
    /// Wall-clock time.
    pub seconds: f64,
}

/// How well the model does on held-out data.
#[derive(Debug, Clone, Copy)]
pub struct Evaluation {
    /// The mean loss.
    pub loss: f64,
    /// The share of right predictions.
    pub accuracy: f64,
}

impl Trainer {
    /// Fresh weights and state.
    pub fn new(plan: Plan, dataset: Dataset, device: &Device) -> Result<Trainer> {
        let dtype = dtype_of(plan.run.train.precision);
        let weights = Weights::initialise(&plan.model, device, dtype, plan.run.seed)?;
        Ok(Trainer {
            steps: plan.total_steps(dataset.len(Split::Train)) as u64,
            order: Order::new(plan.run.seed, dataset.len(Split::Train)),
            model: Model::build(&plan.model, plan.run.train.recompute == Recompute::Block),
            optimizer: Optimizer::new(&plan, &weights)?,
            noise: NoiseScale::default(),
            progress: Progress { step: 0, updates: 0, bad_steps: 0, best_validation: None },
            device: device.clone(),
            dtype,
            weights,
            dataset,
            plan,
        })
    }

    /// Steps of the whole run.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Where the run stands.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// The weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Takes the next step.
    pub fn step(&mut self) -> Result<StepReport> {
        let begin = Instant::now();
        let run = &self.plan.run;
        let (batch, pieces) = (run.train.batch, run.train.micro_batches);
        let mut gradients = Gradients::new(self.weights.ids().count());
        if run.train.noise_scale {
            gradients = gradients.measuring(self.model.tied().clone());
        }
        let (mut statistics, mut loss_sum, mut correct, mut predictions) = (Vec::new(), 0.0, 0, 0);
        let samples = self.order.indices(self.progress.step * batch as u64, batch);
        for (piece, samples) in samples.chunks(batch / pieces).enumerate() {
            let host = self.dataset.batch(Split::Train, samples)?;
            let random = random::key(random::key(run.seed, self.progress.step), piece as u64);
            let (input, targets) = self.upload(&host)?;
            let mut stash = Stash::new();
            let mut pass = Forward {
                weights: &self.weights,
                mode: Mode::Train,
                random,
                stash: &mut stash,
                statistics: &mut statistics,
            };
            let x = self.model.forward(input, &mut pass)?;
            // Each micro-batch weighs by its share of the batch, so that their sum is the gradient of the mean.
            let scale = 1.0 / (host.targets.len() * pieces) as f32;
            let mut pass =
                Backward { weights: &self.weights, random, stash: &mut stash, sink: &mut gradients };
            let outcome = self.model.loss(x, &targets, scale, &mut pass)?;
            loss_sum += outcome.total.loss_sum;
            correct += outcome.total.correct;
            predictions += host.targets.len();
            self.model.backward(outcome.gradient, &mut pass)?;
        }

        let loss = loss_sum / predictions as f64;
        let grad_norm = gradients.squared_norm().sqrt();
        let lr = self.plan.learning_rate.at(self.progress.step as usize, self.steps as usize);
        let taken = loss.is_finite() && grad_norm.is_finite();
        self.progress.step += 1;
        if taken {
            let clip = run.train.clip;
            let scale = if clip > 0.0 { (clip / grad_norm).min(1.0) } else { 1.0 };
            self.progress.updates += 1;
            self.optimizer.step(&mut self.weights, &gradients, self.progress.updates, lr, scale as f32);
            for measured in statistics {
                measured.fold_into(&mut self.weights)?;
            }
            if let Some((small, large)) = gradients.noise_norms() {
                // The parts were scaled by 1 / pieces: undo that to get the gradient of a micro-batch's mean.
                let small = small * pieces as f64;
                self.noise.observe((batch / pieces) as f64, small, batch as f64, large);
            }
        }
        self.progress.bad_steps = if taken { 0 } else { self.progress.bad_steps + 1 };
        // The loss was read back before the optimizer's step: without this, a card would still be at work.
        self.device.synchronize()?;
        Ok(StepReport {
            step: self.progress.step,
            loss,
            accuracy: correct as f64 / predictions as f64,
            lr,
            grad_norm,
            taken,
            noise_scale: self.noise.value(),
            seconds: begin.elapsed().as_secs_f64(),
        })
    }

    /// Runs the model over the validation split, or its first `eval_samples` samples; nothing where none is held out.
    pub fn evaluate(&mut self) -> Result<Option<Evaluation>> {
        let train = &self.plan.run.train;
        let all = self.dataset.len(Split::Validation);
        let count = if train.eval_samples == 0 { all } else { train.eval_samples.min(all) };
        if count == 0 {
            return Ok(None);
        }
        let (mut loss_sum, mut correct, mut predictions) = (0.0, 0, 0);
        let samples: Vec<(u64, usize)> = (0..count).map(|i| (0, i)).collect();
        for samples in samples.chunks(train.batch / train.micro_batches) {
            let host = self.dataset.batch(Split::Validation, samples)?;
            let (input, targets) = self.upload(&host)?;
            let mut pass = Forward {
                weights: &self.weights,
                mode: Mode::Evaluate,
                random: 0,
                stash: &mut Stash::forgetful(),
                statistics: &mut Vec::new(),
            };
            let x = self.model.forward(input, &mut pass)?;
            let total = self.model.evaluate(&x, &targets, &self.weights)?;
            loss_sum += total.loss_sum;
            correct += total.correct;
            predictions += host.targets.len();
        }
        let predictions = predictions as f64;
        let evaluation = Evaluation { loss: loss_sum / predictions, accuracy: correct as f64 / predictions };
        let best = self.progress.best_validation.get_or_insert(evaluation.loss);
        *best = best.min(evaluation.loss);
        Ok(Some(evaluation))
    }

    /// Saves everything that the next step depends on.
    pub fn save(&self, checkpoints: &Checkpoints) -> Result<std::path::PathBuf> {
        let weights: Named<'_> = self.weights.named().map(|(name, tensor)| (name.into(), tensor)).collect();
        let state: Named<'_> = self.optimizer.named().collect();
        checkpoints.save(&self.progress, &[("model.safetensors", weights), ("optimizer.safetensors", state)])
    }

    /// Goes back to the newest whole checkpoint, if there is one.
    pub fn load(
        &mut self,
        checkpoints: &Checkpoints,
        report: impl FnMut(&crate::Error),
    ) -> Result<Option<std::path::PathBuf>> {
        let state: NamedMut<'_> = self.optimizer.named_mut().collect();
        let weights: NamedMut<'_> =
            self.weights.named_mut().map(|(name, tensor)| (name.into(), tensor)).collect();
        let mut files = [("model.safetensors", weights), ("optimizer.safetensors", state)];
        let found = checkpoints.load_latest(&mut files, report)?;
        Ok(found.map(|(path, progress)| {
            self.progress = progress;
            path
        }))
    }

    /// Copies a batch to the device.
    fn upload(&self, host: &HostBatch) -> Result<(Tensor, Tensor)> {
        let targets =
            Tensor::from_slice(&self.device, &[host.targets.len()], &host.targets, Category::Activations)?;
        Ok((host.inputs.upload(&self.device, self.dtype)?, targets))
    }
}

/// The type that kernels compute in.
fn dtype_of(precision: Precision) -> DType {
    match precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
    }
}
