//! One rank that trains: it joins a plan, a data set and a device, and takes steps.
//!
//! A step reads its part of the batch at a position that depends on the step's number alone, sends it through the model in
//! micro-batches, and takes the optimizer's step if every number is finite. Otherwise nothing changes but the count.
//! Before a step the pruning method is asked whether it is time; where it prunes before the first one, dense state never
//! exists.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use espalier_comm::Sent;
use espalier_plan::config::{BatchNorm, Precision, Recompute};
use espalier_plan::memory::StateBytes;
use espalier_plan::{Cut, Plan};
use espalier_tensor::ops::compress::apply;
use espalier_tensor::ops::update::Step;
use espalier_tensor::{DType, Device, Mask, random};

use crate::checkpoint::{Checkpoints, MASKS, MODEL, OPTIMIZER, PRUNER, Room, Saved, Stored, Wanted, Whole};
use crate::data::{Dataset, Order, Split};
use crate::layers::Share;
use crate::model::Model;
use crate::parallel::Ranks;
use crate::parallel::data::{Reducing, average_statistics};
use crate::parallel::local::average;
use crate::parallel::zero::step_shared;
use crate::pass::{Loss, Pass, Totals};
use crate::prune::{self, Decision, Draw, Moment, Network, Observation, Parts, Pruner};
use crate::state::{Gradients, Masks, NoiseScale, Optimizer};
use crate::weights::{ParameterId, Weights};
use crate::{Error, Result};

pub use crate::checkpoint::Progress;

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    plan: Plan,
    steps: u64,
    device: Device,
    dtype: DType,
    dataset: Arc<Dataset>,
    order: Order,
    model: Model,
    weights: Weights,
    candidates: Vec<ParameterId>,
    masks: Masks,
    pruner: Option<Box<dyn Pruner>>,
    /// None until the first step, by when it is known what is kept.
    optimizer: Option<Optimizer>,
    noise: NoiseScale,
    progress: Progress,
    /// Bytes of the last step's gradients of candidates.
    gradient_bytes: usize,
    /// The others, where there are any.
    ranks: Option<Ranks>,
    /// What a step sent to them, of late.
    sent: Sent,
    /// Where ranks go apart: after how many steps they last were the same, and what had been sent by then.
    together: (u64, Sent),
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
    /// What the pruning method saw before the step, where it pruned nothing.
    pub seen: Option<Observation>,
    /// What was pruned before the step.
    pub pruned: Option<Pruned>,
    /// The share of candidates that is gone.
    pub sparsity: f64,
    /// Wall-clock time.
    pub seconds: f64,
}

/// What a pruning method did.
#[derive(Debug, Clone, Default)]
pub struct Pruned {
    /// Candidates kept, and all of them.
    pub kept: (u64, u64),
    /// Parameters of which nothing is left.
    pub emptied: Vec<String>,
    /// What the method says of it.
    pub note: String,
    /// How far the mask is from those drawn before it, where the method compares them.
    pub distances: Vec<f64>,
    /// How the masks are stored: `bits`, `index`, or both.
    pub form: String,
    /// Bytes in use before and after.
    pub bytes: (usize, usize),
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
    /// Fresh weights and state, on one rank alone.
    pub fn new(plan: Plan, dataset: impl Into<Arc<Dataset>>, device: &Device) -> Result<Trainer> {
        Trainer::among(plan, dataset, device, None)
    }

    /// The same as one of several ranks.
    pub fn among(
        plan: Plan,
        dataset: impl Into<Arc<Dataset>>,
        device: &Device,
        ranks: Option<Ranks>,
    ) -> Result<Trainer> {
        let dataset = dataset.into();
        let dtype = dtype_of(plan.run.train.precision);
        let weights = Weights::initialise(&plan.model, device, dtype, plan.run.seed)?;
        let candidates = candidates(&plan);
        let steps = plan.total_steps(dataset.len(Split::Train)) as u64;
        Ok(Trainer {
            steps,
            order: Order::new(plan.run.seed, dataset.len(Split::Train)),
            model: Model::build(&plan.model, plan.run.train.recompute == Recompute::Block),
            masks: Masks::new(weights.ids().count(), plan.run.compresses()),
            pruner: prune::pruner(&plan, steps)?,
            optimizer: None,
            noise: NoiseScale::default(),
            progress: Progress { step: 0, updates: 0, bad_steps: 0, best_validation: None },
            gradient_bytes: 0,
            ranks,
            sent: Sent::default(),
            together: Default::default(),
            device: device.clone(),
            dtype,
            weights,
            candidates,
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

    /// What is kept.
    pub fn masks(&self) -> &Masks {
        &self.masks
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The other ranks, where there are any.
    pub fn ranks(&self) -> Option<&Ranks> {
        self.ranks.as_ref()
    }

    /// Bytes that a step sends to other ranks: the last one or, where ranks go apart, each of the last few on average.
    pub fn sent(&self) -> Sent {
        self.sent
    }

    /// Takes the next step.
    pub fn step(&mut self) -> Result<StepReport> {
        let begin = Instant::now();
        let (seen, pruned) = match self.ask_pruner(self.progress.step)? {
            Decision::Wait => (None, None),
            Decision::Look(seen) => (Some(seen), None),
            Decision::Prune(draw) => (None, Some(self.apply(draw)?)),
        };
        self.ready_optimizer()?;
        let run = &self.plan.run;
        let batch = run.train.batch;
        let own = self.part(batch);
        let size = own.len() / run.train.micro_batches;
        let before = self.ranks.as_ref().map(Ranks::sent);
        let mut gradients = Gradients::new(&self.masks);
        if run.train.noise_scale {
            gradients = gradients.measuring(self.model.tied().clone());
        }
        let (mut statistics, mut totals) = (Vec::new(), Totals::default());
        let others = self.ranks.as_ref().filter(|_| !self.goes_apart());
        let mut sink = Reducing::new(gradients, others, self.model.tied()).sharing(self.cut());
        let position = self.progress.step * batch as u64 + own.start as u64;
        let samples = self.order.indices(position, own.len());
        let random = random::key(random::key(run.seed, self.progress.step), 0);
        // A rank that steps by itself takes the mean over its own samples.
        let loss =
            Loss { random, samples: if self.goes_apart() { own.len() } else { batch }, temperature: 1.0 };
        for (piece, samples) in samples.chunks(size).enumerate() {
            if (piece + 1) * size == own.len() {
                sink.last_micro_batch();
            }
            let share = self.share(own.start + piece * size, size);
            totals.add(self.pass().train_share(samples, loss, &share, &mut statistics, &mut sink)?);
        }
        let mut gradients = sink.finish()?;
        let totals = self.sum(totals)?;

        if let Some((pulled, strength)) = self.pruner.as_ref().and_then(|pruner| pruner.penalty()) {
            for id in pulled {
                gradients.pull(id, self.weights.get(id), strength)?;
            }
        }
        let loss = totals.loss();
        let grad_norm = self.over_parts(gradients.squared_norm()?)?.sqrt();
        let (position, length) = match &self.pruner {
            Some(pruner) => pruner.position(self.progress.step, self.steps),
            None => (self.progress.step, self.steps),
        };
        let lr = self.plan.learning_rate.at(position as usize, length as usize);
        let taken = loss.is_finite() && grad_norm.is_finite();
        self.progress.step += 1;
        if taken {
            let clip = run.train.clip;
            let scale = if clip > 0.0 { (clip / grad_norm).min(1.0) } else { 1.0 };
            self.progress.updates += 1;
            let step = Step { lr: lr as f32, gradient_scale: scale as f32, number: self.progress.updates };
            let optimizer = self.optimizer.as_mut().expect("made before the first step");
            match self.ranks.as_ref().filter(|_| run.parallel.zero) {
                None => optimizer.step(&mut self.weights, &self.masks, &gradients, step)?,
                Some(ranks) => {
                    let (weights, group) = (&mut self.weights, ranks.data());
                    step_shared(optimizer, weights, &self.masks, &gradients, step, group)?;
                }
            }
            for measured in statistics {
                measured.fold_into(&mut self.weights)?;
            }
            let local = run.parallel.batch_norm == BatchNorm::Local && !self.goes_apart();
            if let Some(ranks) = self.ranks.as_ref().filter(|_| local) {
                average_statistics(&mut self.weights, ranks)?;
            }
            if let Some((small, large)) = gradients.noise_norms()? {
                let large = self.over_parts(large)?;
                let small = match &self.ranks {
                    Some(ranks) => ranks.sum(vec![small])?[0],
                    None => small,
                };
                // The parts were scaled by their share of the batch: undo that to get the gradient of a micro-batch's mean.
                let small = small * (batch / size) as f64;
                self.noise.observe(size as f64, small, batch as f64, large);
            }
        }
        if let Some((ranks, before)) = self.ranks.as_ref().zip(before).filter(|_| !self.goes_apart()) {
            self.sent = ranks.sent() - before;
        }
        self.gradient_bytes = self.candidates.iter().map(|id| gradients.bytes(*id)).sum();
        drop(gradients);
        if self.goes_apart() && self.progress.step.is_multiple_of(self.plan.run.parallel.average_every as u64)
        {
            self.come_together()?;
        }
        self.progress.bad_steps = if taken { 0 } else { self.progress.bad_steps + 1 };
        // The loss was read back before the optimizer's step: without this, a card would still be at work.
        self.device.synchronize()?;
        Ok(StepReport {
            step: self.progress.step,
            loss,
            accuracy: totals.accuracy(),
            lr,
            grad_norm,
            taken,
            noise_scale: self.noise.value(),
            sparsity: self.sparsity(),
            seen,
            pruned,
            seconds: begin.elapsed().as_secs_f64(),
        })
    }

    /// Runs the model over the validation split, or its first `eval_samples` samples; nothing where none is held out.
    pub fn evaluate(&mut self) -> Result<Option<Evaluation>> {
        self.come_together()?;
        let train = &self.plan.run.train;
        let all = self.dataset.len(Split::Validation);
        let count = if train.eval_samples == 0 { all } else { train.eval_samples.min(all) };
        if count == 0 {
            return Ok(None);
        }
        let mut totals = Totals::default();
        let samples: Vec<(u64, usize)> = self.part(count).map(|i| (0, i)).collect();
        for samples in samples.chunks(self.plan.micro_batch) {
            totals.add(self.pass().evaluate(samples)?);
        }
        let totals = self.sum(totals)?;
        let evaluation = Evaluation { loss: totals.loss(), accuracy: totals.accuracy() };
        let best = self.progress.best_validation.get_or_insert(evaluation.loss);
        *best = best.min(evaluation.loss);
        Ok(Some(evaluation))
    }

    /// Candidates kept, and all of them.
    pub fn kept(&self) -> (u64, u64) {
        let all = self.candidates.iter().map(|id| self.weights.get(*id).len() as u64).sum();
        let gone: usize = self
            .candidates
            .iter()
            .filter_map(|id| self.masks.get(*id))
            .map(|mask| mask.len() - mask.kept())
            .sum();
        (all - gone as u64, all)
    }

    /// The share of candidates that is gone.
    pub fn sparsity(&self) -> f64 {
        let (kept, all) = self.kept();
        if all == 0 { 0.0 } else { 1.0 - kept as f64 / all as f64 }
    }

    /// Bytes held for each candidate weight, as they are now.
    pub fn state_bytes(&self) -> StateBytes {
        let each = |bytes: usize| bytes as f64 / self.kept().1 as f64;
        let sum = |of: &dyn Fn(ParameterId) -> usize| each(self.candidates.iter().map(|id| of(*id)).sum());
        StateBytes {
            weights: sum(&|id| self.weights.get(id).byte_len()),
            gradients: each(self.gradient_bytes),
            optimizer: sum(&|id| self.optimizer.as_ref().map_or(0, |optimizer| optimizer.bytes(id))),
            mask: sum(&|id| self.masks.get(id).map_or(0, Mask::bytes)),
        }
    }

    /// What the pruning method does after so many steps.
    fn ask_pruner(&mut self, step: u64) -> Result<Decision> {
        let Some(mut pruner) = self.pruner.take() else { return Ok(Decision::Wait) };
        let epoch = (self.dataset.len(Split::Train) / self.plan.run.train.batch).max(1) as u64;
        if pruner.looks(Moment { step, steps: self.steps, epoch }) {
            self.come_together()?;
        }
        let mut network = Network {
            plan: &self.plan,
            step,
            steps: self.steps,
            epoch,
            candidates: &self.candidates,
            masks: &self.masks,
            weights: &mut self.weights,
            parts: Parts {
                model: &self.model,
                dataset: &self.dataset,
                device: &self.device,
                dtype: self.dtype,
            },
            order: &self.order,
            ranks: self.ranks.as_ref(),
        };
        let decision = pruner.before_step(&mut network);
        self.pruner = Some(pruner);
        decision
    }

    /// Puts weights and state under new masks, one parameter at a time.
    fn apply(&mut self, draw: Draw) -> Result<Pruned> {
        let before = self.device.ledger().total();
        let mut emptied = Vec::new();
        let mut forms = Vec::new();
        if draw.reset_state {
            self.optimizer = None;
            // Adam's correction of young moments counts from here.
            self.progress.updates = 0;
        }
        for (id, words) in draw.masks {
            let weight = self.weights.get_mut(id);
            let mask = Mask::new(&self.device, weight.len(), &words)?;
            apply(weight, &mask)?;
            if let Some(optimizer) = &mut self.optimizer {
                let group = self.ranks.as_ref().map(Ranks::data);
                optimizer.remask(id, self.masks.get(id), &mask, self.masks.compress(), group)?;
            }
            if mask.kept() == 0 {
                emptied.push(self.weights.name(id).to_owned());
            }
            forms.push(mask.form().name());
            self.masks.set(id, mask);
        }
        if let Some(ranks) = &self.ranks {
            ranks.agree("pruning masks", &self.masks.hash())?;
        }
        forms.sort_unstable();
        forms.dedup();
        Ok(Pruned {
            kept: self.kept(),
            emptied,
            note: draw.note,
            distances: draw.distances,
            form: forms.join(" and "),
            bytes: (before, self.device.ledger().total()),
        })
    }

    /// Which of so many samples are this rank's.
    fn part(&self, samples: usize) -> Range<usize> {
        self.ranks.as_ref().map_or(0..samples, |ranks| ranks.part(samples))
    }

    /// A micro-batch among the samples of the step.
    fn share(&self, first: usize, samples: usize) -> Share {
        let synchronised = self.plan.run.parallel.batch_norm == BatchNorm::Synchronised;
        let ranks = self.ranks.as_ref().filter(|_| synchronised);
        Share { first, samples, norm_group: ranks.map(|ranks| ranks.data().clone()) }
    }

    /// What came of the passes of all ranks.
    fn sum(&self, own: Totals) -> Result<Totals> {
        let Some(ranks) = &self.ranks else { return Ok(own) };
        let all = ranks.sum(vec![own.loss_sum, own.correct as f64, own.predictions as f64])?;
        Ok(Totals { loss_sum: all[0], correct: all[1] as usize, predictions: all[2] as usize })
    }

    /// Which part of the optimizer's state is this rank's.
    fn cut(&self) -> Cut {
        let sharing = self.ranks.as_ref().filter(|_| self.plan.run.parallel.zero);
        sharing.map_or(Cut::ALONE, Ranks::cut)
    }

    /// A sum over gradients, of which each rank may have its parts. Where each has a gradient of its own it is the mean,
    /// so that a number that is not finite is seen by all.
    fn over_parts(&self, sum: f64) -> Result<f64> {
        match &self.ranks {
            Some(ranks) if self.plan.run.parallel.zero => Ok(ranks.sum(vec![sum])?[0]),
            Some(ranks) if self.goes_apart() => Ok(ranks.sum(vec![sum])?[0] / ranks.data().size() as f64),
            _ => Ok(sum),
        }
    }

    /// Whether ranks take steps by themselves.
    fn goes_apart(&self) -> bool {
        self.ranks.is_some() && self.plan.run.parallel.is_local()
    }

    /// Whether all ranks hold the same weights and state.
    pub fn is_together(&self) -> bool {
        !self.goes_apart() || self.together.0 == self.progress.step
    }

    /// Averages over ranks that have gone apart; all must. They also come together before anything looks at the weights:
    /// pruning, evaluation, a checkpoint.
    pub fn come_together(&mut self) -> Result<()> {
        let Some(ranks) = self.ranks.clone().filter(|_| !self.is_together()) else { return Ok(()) };
        if let Some(optimizer) = &mut self.optimizer {
            average(&mut self.weights, &self.masks, optimizer, ranks.data())?;
        }
        average_statistics(&mut self.weights, &ranks)?;
        let (step, sent) = (self.progress.step, ranks.sent());
        self.sent = (sent - self.together.1).per(step - self.together.0);
        self.together = (step, sent);
        Ok(())
    }

    /// Makes the optimizer's state, once it is known what is kept.
    fn ready_optimizer(&mut self) -> Result<()> {
        if self.optimizer.is_none() {
            self.optimizer = Some(Optimizer::new(&self.plan, &self.weights, &self.masks, self.cut())?);
        }
        Ok(())
    }

    fn pass(&self) -> Pass<'_> {
        Pass {
            model: &self.model,
            weights: &self.weights,
            dataset: &self.dataset,
            device: &self.device,
            dtype: self.dtype,
        }
    }

    /// Saves everything that the next step depends on. All ranks must.
    pub fn save(&mut self, checkpoints: &Checkpoints) -> Result<PathBuf> {
        self.come_together()?;
        self.ready_optimizer()?;
        let optimizer = self.optimizer.as_ref().expect("just made");
        let tensors = |(name, tensor)| (name, Stored::Tensor(tensor));
        let mut files: Vec<(&str, Saved<'_>)> = vec![
            (MODEL, self.weights.named().map(|(name, t)| tensors((name.into(), t))).collect()),
            (OPTIMIZER, optimizer.saved()),
        ];
        if !self.masks.is_empty() {
            let mask = |(id, mask): (ParameterId, &Mask)| {
                (self.weights.name(id).to_owned(), Stored::Words(mask.words()))
            };
            files.push((MASKS, self.masks.iter().map(mask).collect()));
        }
        let remembered = self.pruner.iter().flat_map(|pruner| pruner.save());
        let remembered: Saved<'_> = remembered.map(|(name, words)| (name, Stored::Words(words))).collect();
        if !remembered.is_empty() {
            files.push((PRUNER, remembered));
        }
        checkpoints.save(&self.progress, files, self.ranks.as_ref())
    }

    /// Goes back to the newest whole checkpoint, if there is one.
    pub fn load(&mut self, checkpoints: &Checkpoints, report: impl FnMut(&Error)) -> Result<Option<PathBuf>> {
        let Some(whole) = checkpoints.latest(self.ranks.as_ref(), report)? else { return Ok(None) };
        self.restore(&whole)?;
        Ok(Some(whole.path().to_owned()))
    }

    /// Goes back to a checkpoint.
    pub fn restore(&mut self, whole: &Whole) -> Result<()> {
        self.take_masks(whole)?;
        let mut optimizer = Optimizer::new(&self.plan, &self.weights, &self.masks, self.cut())?;
        let state = Wanted { file: OPTIMIZER, tensors: optimizer.rooms(), elsewhere: 0 };
        whole.fill(&mut [wanted_weights(&mut self.weights), state])?;
        if let Some(pruner) = &mut self.pruner {
            pruner.load(whole.words(PRUNER)?);
        }
        self.optimizer = Some(optimizer);
        self.progress = whole.progress().clone();
        self.together = (self.progress.step, self.ranks.as_ref().map(Ranks::sent).unwrap_or_default());
        Ok(())
    }

    /// Prunes now, whatever the run's own time for it.
    pub fn prune(&mut self) -> Result<Option<Pruned>> {
        let at = self.plan.run.prune.as_ref().map_or(0, |prune| prune.at());
        match self.ask_pruner(at)? {
            Decision::Prune(draw) => self.apply(draw).map(Some),
            Decision::Wait | Decision::Look(_) => Ok(None),
        }
    }

    /// Starts from the weights and masks of a checkpoint of another run, dense or pruned, with fresh state.
    pub fn start_from(&mut self, whole: &Whole) -> Result<()> {
        self.take_masks(whole)?;
        self.refuse_more_pruned(whole)?;
        whole.fill(&mut [wanted_weights(&mut self.weights)])
    }

    /// An error if a checkpoint, whose masks were taken, is pruned further than this run will prune.
    pub fn refuse_more_pruned(&self, whole: &Whole) -> Result<()> {
        let (kept, all) = self.kept();
        let wanted = self.plan.run.prune.as_ref().map(|prune| prune.sparsity);
        if let Some(sparsity) = wanted.filter(|s| self.sparsity() > *s + 0.5 / all.max(1) as f64) {
            return Err(whole.refuse(format!(
                "it is pruned already to {:.4} ({kept} of {all} weights are left), and this run prunes to {sparsity}",
                self.sparsity()
            )));
        }
        Ok(())
    }

    fn take_masks(&mut self, whole: &Whole) -> Result<()> {
        let mut stored = whole.words(MASKS)?;
        for id in self.weights.ids() {
            let (name, len) = (self.weights.name(id).to_owned(), self.weights.get(id).len());
            let Some(words) = stored.remove(&name) else { continue };
            let ragged = !len.is_multiple_of(32) && words.last().is_some_and(|last| last >> (len % 32) != 0);
            if words.len() != len.div_ceil(32) || ragged {
                return Err(whole.refuse(format!("the mask of {name} is not one of {len} weights")));
            }
            self.masks.set(id, Mask::new(&self.device, len, &words)?);
        }
        match stored.into_keys().next() {
            Some(name) => Err(whole.refuse(format!("it has a mask for {name}, which this model has not"))),
            None => Ok(()),
        }
    }
}

/// Weights and running statistics, to be filled from a checkpoint.
fn wanted_weights(weights: &mut Weights) -> Wanted<'_> {
    let tensors = weights.named_mut().map(|(name, tensor)| (name.into(), Room::Tensor(tensor))).collect();
    Wanted { file: MODEL, tensors, elsewhere: 0 }
}

/// The parameters that pruning may touch; without pruning, those that it could.
fn candidates(plan: &Plan) -> Vec<ParameterId> {
    let covered = |parameter: &espalier_plan::spec::Parameter| match &plan.run.prune {
        Some(prune) => prune.covers(parameter),
        None => parameter.prunable,
    };
    let parameters = plan.model.parameters();
    parameters.iter().enumerate().filter(|(_, p)| covered(p)).map(|(i, _)| ParameterId(i)).collect()
}

/// The type that kernels compute in.
fn dtype_of(precision: Precision) -> DType {
    match precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
    }
}
