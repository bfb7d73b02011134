//! One rank that trains: it joins a plan, a data set and a device, and takes steps.
//!
//! A step runs the rank's list of actions ([`crate::step`]): its part of the batch, at a position that depends on the step's
//! number alone, goes through the model in micro-batches, and the optimizer's step is taken if every number is finite.
//! Otherwise nothing changes but the count. Before a step the pruning method is asked whether it is time; where it prunes
//! before the first one, dense state never exists.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use espalier_comm::{Reduce, Sent};
use espalier_plan::Plan;
use espalier_plan::config::{BatchNorm, Precision};
use espalier_plan::memory::StateBytes;
use espalier_plan::schedule::Updates;
use espalier_tensor::ops::compress::apply;
use espalier_tensor::{DType, Device, Mask};

use crate::checkpoint::{Checkpoints, MASKS, MODEL, OPTIMIZER, PRUNER, Saved, Stored, Whole};
use crate::data::{Dataset, Feed, Order, Split};
use crate::parallel::Ranks;
use crate::parallel::groups::Groups;
use crate::parallel::local::average;
use crate::pass::{Pass, Totals};
use crate::prune::{self, Decision, Draw, Moment, Network, Observation, Parts, Pruner};
use crate::stage::Stage;
use crate::state::{Masks, NoiseScale, Optimizer};
use crate::step::{Executor, Flights, NetworkWorker, Scene, Taken, Trace};
use crate::weights::{ParameterId, Weights};
use crate::{Error, Result};

pub use crate::checkpoint::Progress;

/// The tag under which the totals of an asynchronous step travel: above those of parts.
const TOTALS: u32 = 1 << 20;

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    plan: Plan,
    steps: u64,
    device: Device,
    dtype: DType,
    dataset: Arc<Dataset>,
    feed: Feed,
    order: Order,
    stage: Stage,
    groups: Groups,
    executor: Executor,
    flights: Flights,
    /// Steps that had been taken when the executor's list began.
    list_began: u64,
    weights: Weights,
    /// What may be pruned of what this rank holds.
    candidates: Vec<ParameterId>,
    /// Candidates of the whole model that are kept, and all of them.
    kept: (u64, u64),
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
    /// Groups of ranks that share nothing, for steps that each takes by itself.
    nobody: Groups,
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
        let held = Stage::held(&plan, ranks.as_ref())?;
        let weights = Weights::initialise_held(&plan.model, &held, device, dtype, plan.run.seed)?;
        let candidates: Vec<ParameterId> =
            candidates(&plan).into_iter().filter(|id| weights.holds(*id)).collect();
        let steps = plan.total_steps(dataset.len(Split::Train)) as u64;
        let stage = Stage::new(&plan, ranks.as_ref())?;
        let groups = Groups::form(&plan, stage.placement(), ranks.as_ref())?;
        let others = ranks.as_ref().map(|ranks| ranks.stages().clone());
        let mut executor = Executor::new(plan.schedule(1)?, others);
        if ranks.is_some() && plan.run.parallel.batch_norm == BatchNorm::Synchronised {
            // Replicas that took what arrived would meet in their batch norms in different orders.
            executor = executor.in_order();
        }
        let mut trainer = Trainer {
            steps,
            order: Order::new(plan.run.seed, dataset.len(Split::Train)),
            feed: Feed::new(dataset.clone(), device, dtype),
            stage,
            groups,
            executor,
            flights: Flights::default(),
            list_began: 0,
            masks: Masks::new(weights.parameters(), plan.run.compresses()),
            pruner: prune::pruner(&plan, steps)?,
            optimizer: None,
            noise: NoiseScale::default(),
            progress: Progress { step: 0, updates: 0, bad_steps: 0, best_validation: None },
            gradient_bytes: 0,
            ranks,
            sent: Sent::default(),
            together: Default::default(),
            nobody: Groups::default(),
            device: device.clone(),
            dtype,
            weights,
            candidates,
            kept: (0, 0),
            dataset,
            plan,
        };
        trainer.count_kept()?;
        Ok(trainer)
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
        self.begin_list()?;
        let (position, length) = match &self.pruner {
            Some(pruner) => pruner.position(self.progress.step, self.steps),
            None => (self.progress.step, self.steps),
        };
        let lr = self.plan.learning_rate.at(position as usize, length as usize);
        let before = self.ranks.as_ref().map(Ranks::sent);
        let updates = self.updates();
        let count = match updates {
            Updates::EveryMicroBatch => self.plan.run.train.micro_batches,
            _ => 1,
        };
        let mut penalty = self.pruner.as_ref().and_then(|pruner| pruner.penalty());
        if let Some((ids, _)) = &mut penalty {
            ids.retain(|id| self.weights.holds(*id));
        }
        self.progress.step += 1;
        let mut worker = NetworkWorker::new(Scene {
            plan: &self.plan,
            stage: &self.stage,
            groups: if self.goes_apart() { &self.nobody } else { &self.groups },
            ranks: self.ranks.as_ref(),
            feed: &self.feed,
            order: &self.order,
            device: &self.device,
            dtype: self.dtype,
            masks: &self.masks,
            candidates: &self.candidates,
            weights: &mut self.weights,
            optimizer: self.optimizer.as_mut().expect("made before the first step"),
            noise: &mut self.noise,
            progress: &mut self.progress,
            flights: &mut self.flights,
            first_step: self.list_began,
            updates,
            lr,
            penalty,
        });
        self.executor.run(count, &mut worker)?;
        let Taken { totals, grad_norm, taken, gradient_bytes } = worker.outcome;
        self.gradient_bytes = gradient_bytes;
        let totals = if updates == Updates::Flush { totals } else { self.pass_on(totals)? };
        if let Some((ranks, before)) = self.ranks.as_ref().zip(before).filter(|_| !self.goes_apart()) {
            self.sent = ranks.sent() - before;
        }
        if self.progress.step.is_multiple_of(self.plan.run.parallel.average_every as u64) {
            self.come_together()?;
        }
        self.progress.bad_steps = if taken { 0 } else { self.progress.bad_steps + 1 };
        // The loss was read back before the optimizer's step: without this, a card would still be at work.
        self.device.synchronize()?;
        Ok(StepReport {
            step: self.progress.step,
            loss: totals.loss(),
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

    /// Whether nothing is under way: only then can a run be evaluated, saved or stopped.
    pub fn is_at_rest(&self) -> bool {
        self.executor.is_at_rest()
    }

    /// Notes what this rank does when, from `origin` on.
    pub fn trace_since(&mut self, origin: Instant) {
        self.executor.trace = Some(Trace::since(origin));
    }

    /// What this rank did when, where it was noted.
    pub fn trace(&self) -> Option<&Trace> {
        self.executor.trace.as_ref()
    }

    /// Candidates of the model that are kept, and all of them.
    pub fn kept(&self) -> (u64, u64) {
        self.kept
    }

    /// Counts them, each on one stage.
    fn count_kept(&mut self) -> Result<()> {
        let counted = self.candidates.iter().filter(|id| self.groups.speaks_for(**id));
        let (mut kept, mut all) = (0, 0);
        for id in counted {
            let len = self.weights.get(*id).len();
            all += len as u64;
            kept += self.masks.get(*id).map_or(len, Mask::kept) as u64;
        }
        self.kept = match &self.ranks {
            None => (kept, all),
            Some(ranks) => {
                let sums = ranks.sum_over_stages(vec![kept, all])?;
                (sums[0], sums[1])
            }
        };
        Ok(())
    }

    /// When weights change.
    fn updates(&self) -> Updates {
        self.plan.run.parallel.pipeline.as_ref().map_or(Updates::Flush, |pipeline| pipeline.updates())
    }

    /// Puts the executor at the beginning of a list, unless it is in the course of one.
    fn begin_list(&mut self) -> Result<()> {
        if !self.executor.is_at_rest() {
            return Ok(());
        }
        let step = self.progress.step;
        match self.plan.run.parallel.pipeline.as_ref().filter(|pipeline| pipeline.is_asynchronous()) {
            None => self.executor.rewind(),
            Some(pipeline) => {
                let batches = self.next_rest(step, pipeline.drains_every() as u64) - step;
                self.executor.load(self.plan.schedule(batches as usize)?);
            }
        }
        self.flights.restart();
        self.list_began = step;
        Ok(())
    }

    /// The next step after which an asynchronous pipeline runs empty: a function of the run file alone, so that a run that
    /// is resumed does what it would have done.
    fn next_rest(&self, step: u64, drain: u64) -> u64 {
        let run = &self.plan.run;
        let every = [drain, run.train.eval_every as u64, run.checkpoint.every as u64];
        let next = every.into_iter().filter(|every| *every > 0).map(|every| (step / every + 1) * every);
        next.chain([self.steps]).min().expect("the end of the run is one")
    }

    /// Brings what came of a step from where the model ends to rank 0, without anybody waiting for a rank behind it.
    fn pass_on(&self, own: Totals) -> Result<Totals> {
        let Some(ranks) = &self.ranks else { return Ok(own) };
        let (stages, last) = (ranks.relay(), ranks.relay().size() - 1);
        let mut totals = own;
        if stages.rank() == last {
            totals = Totals::from_numbers(&ranks.data().all_reduce(own.to_numbers(), Reduce::Sum)?);
            if last > 0 {
                drop(stages.start_send(totals.to_numbers(), 0, TOTALS)?);
            }
        } else if stages.rank() == 0 {
            totals = Totals::from_numbers(&stages.receive(vec![0.0; 3], last, TOTALS)?);
        }
        Ok(totals)
    }

    /// The share of candidates that is gone.
    pub fn sparsity(&self) -> f64 {
        let (kept, all) = self.kept();
        if all == 0 { 0.0 } else { 1.0 - kept as f64 / all as f64 }
    }

    /// Bytes held for each candidate weight, as they are now.
    pub fn state_bytes(&self) -> StateBytes {
        let own: usize = self.candidates.iter().map(|id| self.weights.get(*id).len()).sum();
        let each = |bytes: usize| bytes as f64 / own as f64;
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
            groups: &self.groups,
            ranks: self.ranks.as_ref(),
            parts: Parts {
                stage: &self.stage,
                dataset: &self.dataset,
                device: &self.device,
                dtype: self.dtype,
            },
            order: &self.order,
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
                let group = self.groups.of(id);
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
        self.count_kept()?;
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

    /// What came of the passes of all ranks.
    fn sum(&self, own: Totals) -> Result<Totals> {
        let Some(ranks) = &self.ranks else { return Ok(own) };
        Ok(Totals::from_numbers(&ranks.sum(own.to_numbers())?))
    }

    /// Those who share out the optimizer's state, where they do.
    fn sharing(&self) -> Option<&Groups> {
        Some(&self.groups).filter(|_| self.plan.run.parallel.zero)
    }

    /// Makes the optimizer's state, once it is known what is kept.
    fn ready_optimizer(&mut self) -> Result<()> {
        if self.optimizer.is_none() {
            let fresh = Optimizer::new(&self.plan, &self.weights, &self.masks, self.sharing())?;
            self.optimizer = Some(fresh);
        }
        Ok(())
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
        self.groups.average_statistics(&mut self.weights)?;
        let (step, sent) = (self.progress.step, ranks.sent());
        self.sent = (sent - self.together.1).per(step - self.together.0);
        self.together = (step, sent);
        Ok(())
    }

    fn pass(&self) -> Pass<'_> {
        Pass {
            stage: &self.stage,
            relay: self.ranks.as_ref().map(Ranks::relay),
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
        let tensors = |(name, tensor): (&str, _)| (name.to_owned(), Stored::Tensor(tensor));
        let mut files: Vec<(&str, Saved<'_>)> =
            vec![(MODEL, self.weights.named().map(tensors).collect()), (OPTIMIZER, optimizer.saved())];
        // Also where nothing of this stage is pruned: another's may be.
        let mask = |(id, mask): (ParameterId, &Mask)| {
            (self.weights.name(id).to_owned(), Stored::Words(mask.words()))
        };
        let masks: Saved<'_> = self.masks.iter().map(mask).collect();
        let remembered = self.pruner.iter().flat_map(|pruner| pruner.save());
        let remembered: Saved<'_> = remembered.map(|(name, words)| (name, Stored::Words(words))).collect();
        files.extend(
            [(MASKS, masks), (PRUNER, remembered)].into_iter().filter(|(_, saved)| !saved.is_empty()),
        );
        checkpoints.save(&self.progress, files, self.ranks.as_ref())
    }

    /// Goes back to the newest whole checkpoint, if there is one. All ranks must.
    pub fn load(&mut self, checkpoints: &Checkpoints, report: impl FnMut(&Error)) -> Result<Option<PathBuf>> {
        let Some(whole) = checkpoints.latest(self.ranks.as_ref(), report)? else { return Ok(None) };
        self.restore(&whole)?;
        Ok(Some(whole.path().to_owned()))
    }

    /// Goes back to a checkpoint. All ranks must.
    pub fn restore(&mut self, whole: &Whole) -> Result<()> {
        self.take_masks(whole)?;
        let mut optimizer = Optimizer::new(&self.plan, &self.weights, &self.masks, self.sharing())?;
        whole.fill(&mut [self.weights.wanted(), optimizer.wanted()])?;
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
        whole.fill(&mut [self.weights.wanted()])
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
        for id in (0..self.weights.parameters()).map(ParameterId) {
            let name = self.weights.name(id).to_owned();
            let Some(words) = stored.remove(&name).filter(|_| self.weights.holds(id)) else { continue };
            let len = self.weights.get(id).len();
            let ragged = !len.is_multiple_of(32) && words.last().is_some_and(|last| last >> (len % 32) != 0);
            if words.len() != len.div_ceil(32) || ragged {
                return Err(whole.refuse(format!("the mask of {name} is not one of {len} weights")));
            }
            self.masks.set(id, Mask::new(&self.device, len, &words)?);
        }
        if let Some(name) = stored.into_keys().next() {
            return Err(whole.refuse(format!("it has a mask for {name}, which this model has not")));
        }
        self.count_kept()
    }
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
