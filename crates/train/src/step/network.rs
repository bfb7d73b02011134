//! What the actions of a list do to a network: passes of its micro-batches, the all-reduce of their
//! gradients, and the update.

mod update;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use espalier_data::{DataSplit, Samples};
use espalier_nn::layers::{BatchSlice, BatchStatistics, DeferredGradients, GradientSink, NormGroup};
use espalier_nn::weights::WeightStore;
use espalier_plan::RankTraffic;
use espalier_plan::schedule::{Action, ChunkWork, ControlMessage, Pass, StageMessage, Updates};
use espalier_plan::split::split;
use espalier_tensor::ops::cross_entropy::BatchLoss;
use espalier_tensor::ops::elementwise::scale_into;
use espalier_tensor::{Tensor, random};

use self::update::{DeferredUpdate, GlobalNorm};
use super::graphed_step::PassOutput;
use super::in_flight::InFlightMicroBatch;
use super::{ActionWorker, BucketSpan, GraphedStep, LossConfig, Totals, TraceKind};
use crate::Result;
use crate::checkpoint::RunProgress;
use crate::context::TrainContext;
use crate::parallel::data::{BucketTime, DataParallel, DataParallelSink, ReduceReport};
use crate::parallel::reduce_groups::ReduceGroups;
use crate::state::{MicroBatchGradients, NoiseNorms, Optimizer, ParamStore, Penalty, WeightVersion};

/// Micro-batches that are under way, and the weights that they began with.
#[derive(Debug, Default)]
pub(crate) struct PipelineState {
    in_flight: HashMap<(usize, usize), InFlightMicroBatch>,
    versions: HashMap<usize, WeightVersion>,
    /// The number of the newest weights, counted from the beginning of the list.
    newest: usize,
    /// The update that makes them, while it is deferred.
    deferred_update: Option<DeferredUpdate>,
}

impl PipelineState {
    /// Forgets the numbers of a list that is at its end.
    pub fn restart(&mut self) {
        debug_assert!(
            self.in_flight.is_empty() && self.deferred_update.is_none(),
            "a list ends with nothing under way"
        );
        *self = PipelineState::default();
    }
}

/// What the steps of a list came to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepOutcome {
    pub totals: Totals,
    pub grad_norm: f64,
    /// Whether all of them changed the weights.
    pub taken: bool,
    /// Bytes of the gradients of candidates.
    pub gradient_bytes: usize,
    /// Whether the ranks have agreed that one of them is asked to stop.
    pub stop: bool,
}

/// What the passes and updates of a step work on.
pub(crate) struct StepContext<'a> {
    pub context: &'a TrainContext,
    /// Who shares which parameter in this step.
    pub groups: &'a ReduceGroups,
    /// What the rank's actions move under the masks of now.
    pub traffic: &'a RankTraffic,
    pub params: &'a mut ParamStore,
    pub optimizer: &'a Optimizer,
    pub progress: &'a mut RunProgress,
    pub pipeline: &'a mut PipelineState,
    /// Where the passes of a batch run as one.
    pub graphed_step: Option<&'a mut GraphedStep>,
    /// Steps that had been taken before the list began.
    pub first_step: u64,
    pub updates: Updates,
    /// Whether the rank steps by itself: its loss, its norm and whether they are finite are then its own.
    pub local: bool,
    pub lr: f64,
    /// Whether this rank is asked to stop, which all learn when they agree.
    pub stop: &'a AtomicBool,
    /// The update whose gradient is made not finite, for a drill.
    pub fault: Option<u64>,
    /// What the pruning method adds to gradients.
    pub penalty: Option<Penalty<'a>>,
}

impl StepContext<'_> {
    /// Ranks along the data axis.
    fn replicas(&self) -> usize {
        self.context.ranks.data().size()
    }
}

/// The network's own worker, for the actions of one step.
pub(crate) struct NetworkWorker<'a> {
    step: StepContext<'a>,
    data_parallel: DataParallel<'a>,
    /// Norms of single micro-batches, where the noise of gradients is measured.
    noise: Option<NoiseNorms>,
    /// Backward passes of each chunk before its gradients are complete.
    missing: Vec<usize>,
    /// Of the micro-batches that have ended, yet to be read: that waits for a GPU.
    losses: Vec<(BatchLoss, usize)>,
    /// By micro-batch, so that running statistics do not depend on the order of the schedule.
    statistics: Vec<(usize, BatchStatistics)>,
    /// When the all-reduces of the update's buckets were under way, until somebody asks.
    bucket_times: Vec<BucketTime>,
    global_norm: Option<GlobalNorm>,
    /// Updates taken, and steps in a row that were not, as the first stage has counted them.
    counts: Option<(u64, u64)>,
    outcome: StepOutcome,
}

impl<'a> NetworkWorker<'a> {
    pub fn new(step: StepContext<'a>) -> NetworkWorker<'a> {
        let totals = Totals::default();
        let outcome = StepOutcome { totals, grad_norm: 0.0, taken: true, gradient_bytes: 0, stop: false };
        let StepContext { context: TrainContext { plan, dtype, model_parallel, .. }, local, groups, .. } =
            step;
        let (several, buckets) = (plan.storage.accumulates.then_some(*dtype), &step.traffic.buckets);
        let counted_elsewhere = step.params.ids().filter(|id| !model_parallel.is_owner(*id));
        let measures = plan.optimization.noise_scale;
        NetworkWorker {
            data_parallel: DataParallel::new(
                plan.data_parallel,
                local,
                step.params,
                several,
                groups,
                buckets,
            ),
            noise: measures.then(|| NoiseNorms::new(counted_elsewhere.collect())),
            missing: missing(&step),
            step,
            losses: Vec::new(),
            statistics: Vec::new(),
            bucket_times: Vec::new(),
            global_norm: None,
            counts: None,
            outcome,
        }
    }

    /// Where a micro-batch of the list stands: the number of its step, and its index within the step.
    fn position(&self, micro_batch: usize) -> (u64, usize) {
        let count = self.step.context.plan.batch.micro_batches;
        (self.step.first_step + (micro_batch / count) as u64, micro_batch % count)
    }

    /// Where a micro-batch stands among the samples of its step.
    fn batch_slice(&self, micro_batch: usize) -> BatchSlice {
        let TrainContext { plan, ranks, .. } = self.step.context;
        let (batch, samples) = (plan.batch.samples, plan.batch.micro_batch);
        let local = ranks.batch_range(batch);
        BatchSlice {
            first: local.start + self.position(micro_batch).1 * samples,
            samples,
            norms: NormGroup::Step,
        }
    }

    /// The samples of a micro-batch: for the stages where they enter and where they are evaluated.
    fn samples(&self, micro_batch: usize) -> Samples {
        let (step, batch) = (self.position(micro_batch).0, self.step.context.plan.batch.samples as u64);
        let BatchSlice { first, samples, .. } = self.batch_slice(micro_batch);
        self.step.context.order.indices(step * batch + first as u64, samples)
    }

    fn random(&self, micro_batch: usize) -> u64 {
        let (step, _) = self.position(micro_batch);
        random::key(random::key(self.step.context.plan.seed, step), 0)
    }

    /// The number of the update that is next, from 0.
    fn update_number(&self) -> u64 {
        let each = match self.step.updates {
            Updates::EveryMicroBatch => self.step.context.plan.batch.micro_batches as u64,
            _ => 1,
        };
        self.step.first_step * each + self.step.pipeline.newest as u64
    }

    /// Samples whose mean is one step's loss.
    fn samples_of_a_step(&self) -> usize {
        let batch = &self.step.context.plan.batch;
        match self.step.updates {
            Updates::EveryMicroBatch => batch.samples / batch.micro_batches,
            // A rank that steps by itself takes the mean over its own samples.
            _ if self.step.local => batch.samples / self.step.replicas(),
            _ => batch.samples,
        }
    }

    /// Targets of the samples whose mean is one step's loss that do not count, on all ranks: which these are is a
    /// function of the step, so that nobody needs to be asked.
    fn ignored_of_a_step(&self, micro_batch: usize) -> usize {
        let TrainContext { plan, ranks, order, dataset, .. } = self.step.context;
        if !dataset.ignores_targets() {
            return 0;
        }
        let (batch, each) = (plan.batch.samples, plan.batch.micro_batch);
        let (step, index) = self.position(micro_batch);
        let ranges = match self.step.updates {
            Updates::EveryMicroBatch => {
                let replicas = self.step.replicas();
                let first = |replica| split(batch, replicas, replica).start + index * each;
                (0..replicas).map(|replica| first(replica)..first(replica) + each).collect()
            }
            _ if self.step.local => vec![ranks.batch_range(batch)],
            _ => vec![0..batch],
        };
        let ignored = |range: Range<usize>| {
            let samples = order.indices(step * batch as u64 + range.start as u64, range.len());
            dataset.ignored(DataSplit::Train, &samples)
        };
        ranges.into_iter().map(ignored).sum()
    }

    /// Targets of a micro-batch that do not count.
    fn ignored(&self, micro_batch: usize) -> usize {
        match self.step.context.dataset.ignores_targets() {
            true => self.step.context.dataset.ignored(DataSplit::Train, &self.samples(micro_batch)),
            false => 0,
        }
    }

    /// Runs gradients of weights into the sink; the last ones of a chunk are complete.
    fn accumulate(&mut self, chunk: usize, run: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.missing[chunk] -= 1;
        // Copies of a stage send when the schedule says so: each sees other micro-batches.
        self.data_parallel.last_micro_batch(self.missing[chunk] == 0 && !self.step.groups.has_copies());
        run(self)?;
        self.noise.as_mut().map_or(Ok(()), NoiseNorms::end_micro_batch)
    }
}

fn missing(step: &StepContext<'_>) -> Vec<usize> {
    let chunks = step.context.stage.chunks().iter();
    match step.updates {
        Updates::EveryMicroBatch => chunks.map(|_| 1).collect(),
        _ => chunks.map(|chunk| step.context.stage.placement().routed(chunk.pipeline).count()).collect(),
    }
}

/// The weights of a version.
fn version<'b>(newest: &'b ParamStore, pipeline: &'b PipelineState, version: usize) -> &'b dyn WeightStore {
    match version == pipeline.newest {
        true => newest,
        false => pipeline.versions.get(&version).expect("a list keeps the versions that it uses"),
    }
}

impl ActionWorker for NetworkWorker<'_> {
    fn forward(&mut self, work: ChunkWork, input: Option<Tensor>) -> Result<Option<Tensor>> {
        let ChunkWork { micro_batch, chunk, .. } = work;
        let (batch_slice, random) = (self.batch_slice(micro_batch), self.random(micro_batch));
        let StepContext {
            context: TrainContext { stage, feed, dataset, .. }, ref params, ref pipeline, ..
        } = self.step;
        let model = stage.model(chunk);
        let (mut inputs, mut targets, mut positions) = (input, None, None);
        if model.is_first() || model.is_last() || dataset.has_positions() {
            let batch = feed.take(&self.samples(micro_batch))?;
            feed.prepare(|ahead| self.samples(micro_batch + ahead));
            if let Some(graphed_step) = &mut self.step.graphed_step {
                graphed_step.load_batch(&batch.inputs, &batch.targets)?;
                return Ok(None);
            }
            if model.is_first() {
                inputs = Some(batch.inputs);
            }
            targets = Some(batch.targets).filter(|_| model.is_last());
            positions = batch.positions;
        }
        let inputs = inputs.expect("samples, or what the chunk before made");
        let weights = version(params, pipeline, work.version);
        let (micro_batch_state, sent) =
            InFlightMicroBatch::forward(model, weights, inputs, targets, positions, batch_slice, random)?;
        self.step.pipeline.in_flight.insert((micro_batch, chunk), micro_batch_state);
        Ok(sent)
    }

    fn backward(
        &mut self,
        work: ChunkWork,
        dy: Option<Tensor>,
        with_weights: bool,
    ) -> Result<Option<Tensor>> {
        let ChunkWork { micro_batch, chunk, .. } = work;
        let loss = LossConfig {
            random: self.random(micro_batch),
            samples: self.samples_of_a_step(),
            ignored: self.ignored_of_a_step(micro_batch),
            temperature: 1.0,
        };
        if self.step.graphed_step.is_some() {
            return self.accumulate(chunk, |worker| worker.forward_and_backward(work, loss)).map(|()| None);
        }
        let mut micro_batch_state =
            self.step.pipeline.in_flight.remove(&(micro_batch, chunk)).expect("a forward came before");
        self.statistics
            .extend(micro_batch_state.statistics.drain(..).map(|measured| (micro_batch, measured)));
        let (mut deferred, mut sent) = (DeferredGradients::default(), None);
        let run = |worker: &mut Self| {
            let StepContext { context: TrainContext { stage, .. }, ref params, ref pipeline, .. } =
                worker.step;
            let (model, weights) = (stage.model(chunk), version(params, pipeline, work.version));
            let mut data_parallel_sink = DataParallelSink {
                data_parallel: &mut worker.data_parallel,
                params,
                noise: worker.noise.as_mut(),
            };
            let sink: &mut dyn GradientSink =
                if with_weights { &mut data_parallel_sink } else { &mut deferred };
            let output = micro_batch_state.backward(model, weights, dy, loss, sink)?;
            let counted = |(total, predictions)| (total, predictions - worker.ignored(micro_batch));
            worker.losses.extend(output.total.map(counted));
            sent = output.gradient;
            Ok(())
        };
        if with_weights {
            self.accumulate(chunk, run)?;
        } else {
            run(self)?;
            micro_batch_state.deferred = Some(deferred);
            self.step.pipeline.in_flight.insert((micro_batch, chunk), micro_batch_state);
        }
        Ok(sent)
    }

    fn recv_buffer(&mut self, message: &StageMessage) -> Result<Tensor> {
        let TrainContext { plan, stage, device, dtype, .. } = self.step.context;
        stage.recv_buffer(message, plan.batch.micro_batch, device, *dtype)
    }

    fn bytes(&self, action: &Action) -> u64 {
        if self.step.local { 0 } else { self.step.traffic.bytes(action) }
    }

    fn kind(&self, action: &Action) -> Option<TraceKind> {
        match (action.compute(), &self.step.graphed_step) {
            // It only takes the batch: both passes run where the backward stands.
            (Some((Pass::Forward, _)), Some(_)) => None,
            (Some((_, ChunkWork { micro_batch, .. })), Some(graphed_step)) => {
                Some(TraceKind::BothPasses { micro_batch, replayed: graphed_step.is_captured() })
            }
            _ => TraceKind::of(action),
        }
    }

    fn bucket_spans(&mut self) -> Vec<BucketSpan> {
        let traffic = self.step.traffic;
        let span = |BucketTime { bucket: number, start, end }: BucketTime| {
            let bucket = &traffic.buckets.list()[number];
            let kind = TraceKind::Bucket { number, block: bucket.block, parameters: bucket.parameters.len() };
            BucketSpan { kind, bytes: traffic.of_bucket(number), start, end }
        };
        self.bucket_times.drain(..).map(span).collect()
    }

    fn scalars_to_send(&mut self, message: ControlMessage) -> Vec<f64> {
        self.scalars_of(message.topic)
    }

    fn receive_scalars(&mut self, message: ControlMessage, scalars: &[f64]) {
        self.take_scalars(message.topic, scalars);
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::BackwardWeight(work) => self.backward_weight(work),
            Action::AllReduce { chunk } => self.all_reduce(chunk),
            Action::WaitReduce => self.wait_reduce(),
            Action::Agree => self.agree(),
            Action::Step => self.step(),
            Action::Commit => self.commit(),
            Action::Settle => self.settle(),
            Action::Gather => self.gather(),
            Action::Stash { version } => self.stash(version),
            Action::Drop { version } => {
                self.step.pipeline.versions.remove(&version);
                Ok(())
            }
            _ => unreachable!("{action:?} is the executor's, or in no list that trains"),
        }
    }
}

impl NetworkWorker<'_> {
    /// Forward and backward of the batch that was taken, through a model that is all here.
    fn forward_and_backward(&mut self, work: ChunkWork, loss: LossConfig) -> Result<()> {
        let batch_slice = self.batch_slice(work.micro_batch);
        let StepContext { context: TrainContext { stage, .. }, ref params, ref mut graphed_step, .. } =
            self.step;
        let params: &ParamStore = params;
        let model = stage.model(work.chunk);
        let pass = |inputs, targets| {
            let (mut micro_batch_state, _) = InFlightMicroBatch::forward(
                model,
                params,
                inputs,
                Some(targets),
                None,
                batch_slice,
                loss.random,
            )?;
            let mut gradients = MicroBatchGradients::new(params);
            let output = micro_batch_state.backward(model, params, None, loss, &mut gradients)?;
            let gradients = gradients.take();
            let total = output.total.expect("the model ends here");
            Ok(PassOutput { gradients, total, statistics: micro_batch_state.statistics })
        };
        let graphed_step = graphed_step.as_mut().expect("who has none does not come here");
        let PassOutput { gradients, total, statistics } = graphed_step.run(params, pass)?;
        self.losses.push(total);
        self.statistics.extend(statistics.into_iter().map(|measured| (work.micro_batch, measured)));
        gradients.into_iter().for_each(|(id, gradient)| self.data_parallel.set_gradient(id, gradient));
        Ok(())
    }

    fn backward_weight(&mut self, work: ChunkWork) -> Result<()> {
        let key = (work.micro_batch, work.chunk);
        let micro_batch_state =
            self.step.pipeline.in_flight.remove(&key).expect("its input half came before");
        let deferred = micro_batch_state.deferred.expect("its input half deferred them");
        self.accumulate(work.chunk, |worker| {
            let params: &ParamStore = worker.step.params;
            Ok(deferred.run(&mut DataParallelSink {
                data_parallel: &mut worker.data_parallel,
                params,
                noise: worker.noise.as_mut(),
            })?)
        })
    }

    fn all_reduce(&mut self, chunk: usize) -> Result<()> {
        if !self.step.groups.has_copies() {
            // The backwards that completed them have started all reductions.
            return Ok(());
        }
        self.data_parallel.reduce_all(self.step.params, self.step.context.stage.parameters(chunk))
    }

    /// Waits for the all-reduces of this update's gradients.
    fn wait_reduce(&mut self) -> Result<()> {
        let injects_nan = self.step.fault == Some(self.update_number());
        let params = &mut *self.step.params;
        let ReduceReport { bytes, times } = self.data_parallel.finish(params)?;
        self.outcome.gradient_bytes = bytes;
        self.bucket_times.extend(times);
        self.missing = missing(&self.step);
        let params = &mut *self.step.params;
        // As an overflow would.
        if injects_nan && let Some(first) = params.iter_mut().find_map(|(_, param)| param.gradient.as_mut()) {
            scale_into(first, f32::NAN)?;
        }
        self.step.penalty.as_ref().map_or(Ok(()), |penalty| penalty.add_clipped(params))
    }

    fn stash(&mut self, version: usize) -> Result<()> {
        let copy = self.step.params.version()?;
        self.step.pipeline.versions.insert(version, copy);
        Ok(())
    }
}
