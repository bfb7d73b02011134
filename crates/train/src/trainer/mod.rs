//! One rank that trains: it joins a plan, a data set and a device, and takes steps.
//!
//! A step runs the rank's list of actions ([`crate::step`]): its slice of the batch, at a position that
//! depends on the step's number alone, goes through the model in micro-batches, and the optimizer's step is
//! taken if every number is finite. Otherwise nothing changes but the count. Before a step the pruning method
//! is asked whether it is time; where it prunes before the first one, dense state never exists.

mod checkpointing;
mod evaluation;
mod goal_check;
mod pruning;
mod state_mask;
mod zeros;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use espalier_comm::SentBytes;
use espalier_data::Dataset;
use espalier_nn::weights::ParameterId;
use espalier_plan::schedule::{Schedule, Updates};
use espalier_plan::{Plan, RankTraffic, Scoring};
use espalier_tensor::Device;

use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::context::TrainContext;
use crate::infer::Generator;
use crate::parallel::Ranks;
use crate::parallel::model::ModelParallel;
use crate::parallel::reduce_groups::ReduceGroups;
use crate::prune::{self, Decision, LayerDensity, Observation, PruneReport, Pruner};
use crate::shared_scores::ScoresOfRun;
use crate::stage::Stage;
use crate::state::{Optimizer, ParamStore, WeightStorage, WeightStorageMode};
use crate::step::{
    AveragingWorker, Executor, GraphedStep, NetworkWorker, PipelineState, StepContext, StepOutcome, Trace,
};
use pruning::sparse_products;

pub use crate::checkpoint::RunProgress;
pub use evaluation::Evaluation;
pub use goal_check::GoalCheck;

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    context: TrainContext,
    executor: Executor,
    pipeline: PipelineState,
    /// Where the passes of a batch run as one.
    graphed_step: Option<GraphedStep>,
    /// Steps that had been taken when the executor's list began.
    list_start: u64,
    params: ParamStore,
    /// What is kept of each candidate of the full model.
    kept: Vec<LayerDensity>,
    /// What its actions move, under the masks of now.
    traffic: RankTraffic,
    pruner: Option<Box<dyn Pruner>>,
    /// How the pruner scored, where it did so by gradients of all candidates.
    scoring: Option<Scoring>,
    /// Bytes of its device that it may take, where less than all.
    memory: Option<u64>,
    /// What is multiplied without its zeros once most of it is zero.
    sparse: HashSet<ParameterId>,
    optimizer: Optimizer,
    /// Whether parameters have the optimizer's state: from the first step on, by when it is known what is kept.
    has_state: bool,
    /// What the weights were read from, where that has more digits than they: their masters begin there.
    origin: Option<Checkpoint>,
    progress: RunProgress,
    /// Whether this rank is asked to stop.
    stop: Arc<AtomicBool>,
    /// Whether any was when ranks last agreed on a step, or came together.
    stop_agreed: bool,
    /// Bytes of the last step's gradients of candidates.
    gradient_bytes: usize,
    /// The most that weights, gradients, optimizer state and masks took in a step, and what they took in the
    /// last one.
    state_peak: [u64; 2],
    /// What a step sent to other ranks, of late.
    sent: SentBytes,
    /// Where ranks go apart: after how many steps they last were the same, and what had been sent by then.
    last_sync: (u64, SentBytes),
    /// Groups of ranks that share nothing, for steps that each takes by itself.
    no_groups: ReduceGroups,
    /// The layout in which the ranks generate text, where it differs, once one was asked for.
    generation_layout: OnceLock<(Plan, Stage)>,
    /// The update that a drill spoils.
    fault: Option<u64>,
}

/// What one step did.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// The mean loss over the batch, before the step; where ranks step by themselves, over the rank's slice.
    pub loss: f64,
    /// The fraction of right predictions in the batch.
    pub accuracy: f64,
    /// The learning rate.
    pub lr: f64,
    /// The norm of the gradient before clipping; where ranks step by themselves, of the rank's own.
    pub grad_norm: f64,
    /// Whether the weights changed: false where a loss or gradient was not finite.
    pub taken: bool,
    /// The gradient noise scale, where it is measured.
    pub noise_scale: Option<f64>,
    /// What the pruning method saw before the step, where it pruned nothing.
    pub observation: Option<Observation>,
    /// What was pruned before the step.
    pub pruned: Option<PruneReport>,
    /// The fraction of candidates that is gone.
    pub sparsity: f64,
    /// Wall-clock time.
    pub seconds: f64,
}

impl Trainer {
    /// Fresh weights and state, on a single rank.
    pub fn new(plan: Plan, dataset: impl Into<Arc<Dataset>>, device: &Device) -> Result<Trainer> {
        Trainer::distributed(plan, dataset, device, Ranks::single())
    }

    /// The same as one of several ranks.
    pub fn distributed(
        plan: Plan,
        dataset: impl Into<Arc<Dataset>>,
        device: &Device,
        ranks: Ranks,
    ) -> Result<Trainer> {
        let context = TrainContext::new(plan, dataset, device, ranks)?;
        let TrainContext { plan, ranks, dtype, steps, .. } = &context;
        // Ranks that split state split that of kept weights, also where masks come from what the run starts from.
        let compresses = plan.storage.compressed || plan.data_parallel.is_sharded();
        let storage_mode = match &plan.pruning {
            Some(pruning) if plan.storage.compressed_weights => match pruning.method.needs_no_pass() {
                true => WeightStorageMode::Uninitialised,
                false => WeightStorageMode::Compressed,
            },
            _ => WeightStorageMode::Dense,
        };
        let local = context.local();
        let params = ParamStore::with_storage(
            &context.params,
            local,
            device,
            *dtype,
            plan.seed,
            compresses,
            WeightStorage { mode: storage_mode, groups: &|group| context.groups.of(group).cloned() },
        )?;
        let mut executor = Executor::new(plan.schedule(1)?, ranks.stages().clone());
        executor.connect()?;
        ranks.connect(plan)?;
        if (!ranks.is_single() && plan.batch.synchronises_norms())
            || ranks.model_parallel().size() > 1
            || plan.data_parallel.shards_weights()
        {
            // Ranks that took what arrived would call the collectives of their layers, or gather the weights of
            // their blocks, in different orders.
            executor = executor.in_order();
        }
        let traffic = plan.traffic(ranks.rank(), &plan.gradient_lengths(ranks.rank()))?;
        let mut trainer = Trainer {
            executor,
            traffic,
            pipeline: PipelineState::default(),
            graphed_step: None,
            list_start: 0,
            pruner: prune::pruner(plan, *steps)?,
            scoring: None,
            memory: None,
            sparse: sparse_products(plan, &params, device)?,
            optimizer: Optimizer::new(plan),
            has_state: false,
            origin: None,
            progress: RunProgress::default(),
            stop: Arc::default(),
            stop_agreed: false,
            gradient_bytes: 0,
            state_peak: [0; 2],
            sent: SentBytes::default(),
            last_sync: Default::default(),
            no_groups: ReduceGroups::default(),
            generation_layout: OnceLock::new(),
            fault: None,
            params,
            kept: Vec::new(),
            context,
        };
        trainer.count_kept()?;
        Ok(trainer)
    }

    /// Steps of the whole run.
    pub fn steps(&self) -> u64 {
        self.context.steps
    }

    /// Where the run stands.
    pub fn progress(&self) -> &RunProgress {
        &self.progress
    }

    /// The parameters of this rank's stages, as they are now.
    pub fn params(&self) -> &ParamStore {
        &self.params
    }

    /// The ranks that have shards of the same layers.
    pub fn model_parallel(&self) -> &ModelParallel {
        &self.context.model_parallel
    }

    /// What this rank computes on, with its ledger.
    pub fn device(&self) -> &Device {
        &self.context.device
    }

    pub fn ranks(&self) -> &Ranks {
        &self.context.ranks
    }

    /// How the pruner scored, where it did so by gradients of all candidates.
    pub fn scoring(&self) -> Option<Scoring> {
        self.scoring
    }

    /// Has the passes of a batch captured as a CUDA graph, where they can be: steps of a small network are
    /// then several times as fast on a GPU, which keeps what they work on as long as this lives. Whether they
    /// can be.
    pub fn enable_graphed_step(&mut self) -> bool {
        self.graphed_step = GraphedStep::is_supported(&self.context).then(GraphedStep::default);
        self.graphed_step.is_some()
    }

    /// Whether the last step's passes were a replay of the graph.
    pub fn replays_graph(&self) -> bool {
        self.graphed_step.as_ref().is_some_and(GraphedStep::is_captured)
    }

    /// Lets the pruner score as a run did that began alike, on one rank, or leave its scores to such.
    pub fn share_scores(&mut self, scores: ScoresOfRun) {
        self.context.scores = Some(scores);
    }

    /// Lets the pruner score as if the device had no more than so many bytes.
    pub fn limit_memory(&mut self, bytes: u64) {
        self.memory = Some(bytes);
    }

    /// What its actions move, under the masks of now.
    pub fn traffic(&self) -> &RankTraffic {
        &self.traffic
    }

    /// Bytes that a step sends to other ranks: the last one or, where ranks go apart, each of the last few on
    /// average.
    pub fn sent(&self) -> SentBytes {
        self.sent
    }

    /// Listens to who asks this rank to stop.
    pub(crate) fn set_stop_flag(&mut self, stop: Arc<AtomicBool>) {
        self.stop = stop;
    }

    /// Whether a rank was asked to stop, as all of them know: from what they agree on in a step, at the end
    /// of a list or in an average, never by a message of its own. So one that is asked later stops a step
    /// later.
    pub(crate) fn should_stop(&self) -> bool {
        self.stop_agreed || (self.context.ranks.is_single() && self.stop.load(Ordering::Relaxed))
    }

    /// Takes the next step.
    pub fn step(&mut self) -> Result<StepReport> {
        let begin = Instant::now();
        let report = self.step_queued()?;
        // The loss was read back before the optimizer's step: without this, a GPU would still be at work.
        self.context.device.synchronize()?;
        Ok(StepReport { seconds: begin.elapsed().as_secs_f64(), ..report })
    }

    /// The same, and leaves a GPU at work on the optimizer's step: what comes next queues behind it. Its
    /// `seconds` are those until the loss was there.
    pub fn step_queued(&mut self) -> Result<StepReport> {
        let _span = tracing::error_span!("step", number = self.progress.step + 1).entered();
        let begin = Instant::now();
        let (observation, pruned) = match self.ask_pruner(self.progress.step)? {
            Decision::Wait => (None, None),
            Decision::Observe(observation) => (Some(observation), None),
            Decision::Prune(new_masks) => (None, Some(self.apply(new_masks)?)),
        };
        self.ready_optimizer()?;
        if self.state_peak == [0; 2] {
            // What was allocated to make the model, or to score it, is none of its first step's.
            self.take_state_peak();
        }
        self.begin_list()?;
        let (position, length) = match &self.pruner {
            Some(pruner) => pruner.position(self.progress.step, self.context.steps),
            None => (self.progress.step, self.context.steps),
        };
        let rate = &self.context.plan.optimization.learning_rate;
        let lr = rate.at(position as usize, length as usize) * rate.density_factor(1.0 - self.sparsity());
        let before = self.context.ranks.sent();
        let updates = self.updates();
        let count = match updates {
            Updates::EveryMicroBatch => self.context.plan.batch.micro_batches,
            _ => 1,
        };
        let penalty = self.pruner.as_ref().and_then(|pruner| pruner.penalty());
        let local = self.is_local();
        self.progress.step += 1;
        let eager = penalty.is_some() || self.fault.is_some();
        let mut worker = NetworkWorker::new(StepContext {
            context: &self.context,
            graphed_step: self.graphed_step.as_mut().filter(|_| !eager),
            groups: if local { &self.no_groups } else { &self.context.groups },
            traffic: &self.traffic,
            params: &mut self.params,
            optimizer: &self.optimizer,
            progress: &mut self.progress,
            pipeline: &mut self.pipeline,
            first_step: self.list_start,
            updates,
            local,
            lr,
            stop: &self.stop,
            fault: self.fault,
            penalty,
        });
        self.executor.run(count, &mut worker)?;
        let StepOutcome { totals, grad_norm, taken, gradient_bytes, stop } = worker.finish();
        (self.gradient_bytes, self.stop_agreed) = (gradient_bytes, stop);
        self.record_state_peak();
        if !local {
            self.sent = self.context.ranks.sent() - before;
            self.last_sync = (self.progress.step, self.context.ranks.sent());
        }
        if self.context.plan.data_parallel.averages_after(self.progress.step) {
            self.average()?;
        }
        Ok(StepReport {
            step: self.progress.step,
            loss: totals.loss(),
            accuracy: totals.accuracy(),
            lr,
            grad_norm,
            taken,
            noise_scale: self.progress.noise.value(),
            sparsity: self.sparsity(),
            observation,
            pruned,
            seconds: begin.elapsed().as_secs_f64(),
        })
    }

    /// The rank: all that it was given when it started.
    pub fn context(&self) -> &TrainContext {
        &self.context
    }

    /// The model as it is now, to generate text. All ranks must call it, between steps.
    pub fn generator(&self) -> Result<Generator<'_>> {
        let TrainContext { plan, stage, ranks, device, .. } = &self.context;
        let (plan, stage) = match plan.for_generation()? {
            None => (plan, stage),
            Some(generation_layout) => {
                let built = Stage::new(&generation_layout, ranks)?;
                let (plan, stage) = self.generation_layout.get_or_init(|| (generation_layout, built));
                (plan, stage)
            }
        };
        Generator::new(plan, stage, &self.params, ranks, device)
    }

    /// Where its samples come from.
    pub fn dataset(&self) -> &Dataset {
        &self.context.dataset
    }

    /// Has an evaluation done before the next step.
    pub(crate) fn evaluate_first(&mut self) {
        self.progress.evaluation_due = true;
    }

    /// Forgets the best validation loss: from here on it is another model.
    pub(crate) fn forget_best(&mut self) {
        self.progress.best_validation = None;
    }

    /// Whether nothing is under way: only then can a run be evaluated, saved or stopped.
    pub fn is_idle(&self) -> bool {
        self.executor.is_idle()
    }

    /// Notes what this rank does when, from `origin` on.
    pub fn trace_since(&mut self, origin: Instant) {
        self.executor.trace = Some(Trace::since(origin));
    }

    /// What this rank did when, where it was noted.
    pub fn trace(&self) -> Option<&Trace> {
        self.executor.trace.as_ref()
    }

    /// When weights change.
    fn updates(&self) -> Updates {
        self.context.plan.pipeline.updates()
    }

    /// A drill: this rank's gradient of an update, counted from 0, will not be finite.
    pub fn inject_nan_at(&mut self, update: u64) {
        self.fault = Some(update);
    }

    /// Puts the executor at the beginning of a list, unless it is in the course of one.
    fn begin_list(&mut self) -> Result<()> {
        if !self.executor.is_idle() {
            return Ok(());
        }
        // What an evaluation left: a list begins with nothing.
        self.params.release_blocks();
        let step = self.progress.step;
        match self.context.plan.pipeline.is_asynchronous() {
            false => self.executor.rewind(),
            true => {
                let batches = self.next_drain(step) - step;
                self.executor.load(self.context.plan.schedule(batches as usize)?);
            }
        }
        self.pipeline.restart();
        self.list_start = step;
        Ok(())
    }

    /// The next step after which an asynchronous pipeline runs empty: a function of the run file alone, so
    /// that a run that is resumed does what it would have done.
    fn next_drain(&self, step: u64) -> u64 {
        let drain = self.context.plan.pipeline.drain;
        let next = [
            Some((step / drain + 1) * drain),
            self.context.plan.intervals.next_check(step),
            Some(self.context.steps),
        ];
        next.into_iter().flatten().min().expect("the end of the run is one")
    }

    /// Makes the optimizer's state, once it is known what is kept.
    fn ready_optimizer(&mut self) -> Result<()> {
        if !self.has_state {
            self.optimizer.make_state(&mut self.params)?;
            if let Some(origin) = self.origin.take() {
                self.params.start_masters(origin.exact_shards(&self.context.plan.model))?;
            }
            self.has_state = true;
        }
        Ok(())
    }

    /// Whether this rank takes the next step by itself.
    fn is_local(&self) -> bool {
        !self.context.ranks.is_single() && self.context.plan.data_parallel.is_local_at(self.progress.step)
    }

    /// Whether all ranks hold the same weights and state.
    pub fn is_in_sync(&self) -> bool {
        !self.is_local() || self.last_sync.0 == self.progress.step
    }

    /// Averages over ranks that have gone apart; all must. They also come together before anything reads
    /// the weights: pruning, evaluation, a checkpoint.
    pub fn average(&mut self) -> Result<()> {
        if self.is_in_sync() {
            return Ok(());
        }
        let list = Schedule::average(self.context.stage.placement());
        let mut stop = self.stop.load(Ordering::Relaxed);
        let mut worker = AveragingWorker {
            context: &self.context,
            traffic: &self.traffic,
            params: &mut self.params,
            has_state: self.has_state,
            progress: &mut self.progress,
            stop: &mut stop,
        };
        self.executor.run_between(list, &mut worker)?;
        self.stop_agreed |= stop;
        let (step, sent) = (self.progress.step, self.context.ranks.sent());
        self.sent = (sent - self.last_sync.1).per(step - self.last_sync.0);
        self.last_sync = (step, sent);
        Ok(())
    }
}
