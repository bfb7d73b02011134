//! Passes that change no weights, on the lists of [`Schedule::forward_only`] and
//! [`Schedule::forward_and_backward`].

use std::collections::HashMap;

use espalier_comm::Communicator;
use espalier_data::{DataSplit, Dataset, Fetched};
use espalier_nn::layers::{BatchSlice, BatchStatistics, ForwardContext, GradientSink, InputObserver, Mode};
use espalier_nn::model::Model;
use espalier_nn::weights::WeightStore;
use espalier_plan::schedule::{ChunkWork, Schedule, StageMessage};
use espalier_tensor::{DType, Device, Tensor};

use super::in_flight::InFlightMicroBatch;
use super::{ActionWorker, Executor, LossConfig, Totals};
use crate::Result;
use crate::context::TrainContext;
use crate::stage::Stage;

/// What such passes work on.
#[derive(Clone, Copy)]
pub struct NoUpdatePass<'a> {
    /// The layers: all, or those of this rank.
    pub stage: &'a Stage,
    /// The ranks of the pipeline.
    pub pipeline_group: &'a Communicator,
    /// The weights that they are run with, which need not be those that train.
    pub weights: &'a dyn WeightStore,
    /// Where samples come from.
    pub dataset: &'a Dataset,
    /// The device that samples are sent to.
    pub device: &'a Device,
    /// The type that kernels compute in.
    pub dtype: DType,
}

impl<'a> NoUpdatePass<'a> {
    /// Passes of a rank with these weights.
    pub fn of(context: &'a TrainContext, weights: &'a dyn WeightStore) -> NoUpdatePass<'a> {
        NoUpdatePass {
            stage: &context.stage,
            pipeline_group: context.ranks.stages(),
            weights,
            dataset: &context.dataset,
            device: &context.device,
            dtype: context.dtype,
        }
    }
}

/// Samples that run forward together.
#[derive(Debug, Clone, Copy)]
pub struct PassMicroBatch<'a> {
    pub samples: &'a [(u64, usize)],
    /// Whether what comes of it counts: not where it stands in, so that a replica with fewer samples takes part
    /// in what the others gather.
    pub counts: bool,
}

/// A sample that every data set has.
const STAND_IN: &[(u64, usize)] = &[(0, 0)];

impl<'a> PassMicroBatch<'a> {
    /// So many samples at a time.
    pub fn chunks(samples: &'a [(u64, usize)], micro_batch: usize) -> Vec<PassMicroBatch<'a>> {
        samples.chunks(micro_batch).map(|samples| PassMicroBatch { samples, counts: true }).collect()
    }

    /// The same of a replica's samples out of so many of all; where replicas have shards of weights, each gets
    /// as many as the one with most.
    pub(crate) fn of_replica(
        context: &TrainContext,
        samples: &'a [(u64, usize)],
        all: usize,
        micro_batch: usize,
    ) -> Vec<PassMicroBatch<'a>> {
        let mut micro_batches = PassMicroBatch::chunks(samples, micro_batch);
        if context.plan.data_parallel.shards_weights() {
            let most = context.ranks.largest_range(all).div_ceil(micro_batch);
            micro_batches.resize(most, PassMicroBatch { samples: STAND_IN, counts: false });
        }
        micro_batches
    }
}

impl NoUpdatePass<'_> {
    /// Training samples forward and backward, a slice of a step's batch: their gradients go to the sink, what
    /// batch norm saw to `statistics`.
    pub fn train(
        &self,
        samples: &[(u64, usize)],
        loss: LossConfig,
        batch_slice: &BatchSlice,
        statistics: &mut Vec<BatchStatistics>,
        sink: &mut dyn GradientSink,
    ) -> Result<Totals> {
        let batch = self.read(DataSplit::Train, samples)?;
        let mut worker = GradientWorker {
            no_update_pass: *self,
            batch,
            samples: samples.len(),
            ignored: self.dataset.ignored(DataSplit::Train, samples),
            loss,
            batch_slice,
            in_flight: HashMap::new(),
            statistics,
            sink,
            totals: Totals::default(),
        };
        self.run(Schedule::forward_and_backward(self.stage.placement()), &mut worker)?;
        Ok(worker.totals)
    }

    /// Validation samples forward, each rank running ahead of those behind it; what came of it is known where
    /// the model ends.
    pub fn evaluate(&self, micro_batches: &[PassMicroBatch<'_>]) -> Result<Totals> {
        self.forward_only(DataSplit::Validation, micro_batches, None)
    }

    /// A validation sample forward, through a model that is all here: its logits.
    pub fn last_logits(&self, sample: usize) -> Result<Vec<f32>> {
        let (model, x) = self.forward_whole(&[(0, sample)])?;
        Ok(model.read_logits(&model.last_logits(&x, self.weights)?)?)
    }

    /// Validation samples of few classes forward, through a model that is all here: their logits, row by row,
    /// and how many there are of each.
    pub fn logits(&self, samples: &[(u64, usize)]) -> Result<(Vec<f32>, usize)> {
        let (model, x) = self.forward_whole(samples)?;
        let logits = model.logits(&x, self.weights)?;
        Ok((logits.read_f32()?, logits.width()))
    }

    fn forward_whole(&self, samples: &[(u64, usize)]) -> Result<(&Model, Tensor)> {
        let (batch, model) = (self.read(DataSplit::Validation, samples)?, self.stage.model(0));
        let batch_slice = BatchSlice { samples: samples.len(), ..BatchSlice::default() };
        let mut pass = ForwardContext::new(self.weights, Mode::Evaluate, 0, batch_slice);
        Ok((model, model.forward(self.input(None, &batch)?, &mut pass)?))
    }

    /// Training samples forward, as in evaluation: dropout passes, and batch norms use what they have measured.
    /// The observer sees what each linear layer of this rank reads, and no loss is made. Of a model in several
    /// copies one is run, so that each layer is seen once.
    pub fn observe(
        &self,
        micro_batches: &[PassMicroBatch<'_>],
        observer: &mut dyn InputObserver,
    ) -> Result<()> {
        // As many micro-batches are under way as there are stages.
        let mut groups = micro_batches.chunks(self.stage.placement().ranks());
        groups.try_for_each(|group| self.forward_only(DataSplit::Train, group, Some(observer)).map(drop))
    }

    /// Who is observed is not evaluated.
    fn forward_only(
        &self,
        split: DataSplit,
        micro_batches: &[PassMicroBatch<'_>],
        observer: Option<&mut dyn InputObserver>,
    ) -> Result<Totals> {
        let batches = micro_batches.iter().map(|one| self.read(split, one.samples));
        let mut worker = ForwardWorker {
            no_update_pass: *self,
            batches: batches.collect::<Result<_>>()?,
            micro_batches,
            ignored: micro_batches.iter().map(|one| self.dataset.ignored(split, one.samples)).collect(),
            observer,
            totals: Totals::default(),
        };
        self.run(Schedule::forward_only(self.stage.placement(), micro_batches.len()), &mut worker)?;
        Ok(worker.totals)
    }

    fn run(&self, schedule: Schedule, worker: &mut dyn ActionWorker) -> Result<()> {
        Executor::new(schedule, self.pipeline_group.clone()).run_to_end(worker)
    }

    /// Samples, where they enter this rank's chunks or are evaluated there.
    fn read(&self, split: DataSplit, samples: &[(u64, usize)]) -> Result<Option<Fetched>> {
        let mut models = (0..self.stage.chunks().len()).map(|chunk| self.stage.model(chunk));
        let needed = self.dataset.has_positions() || models.any(|model| model.is_first() || model.is_last());
        Ok(needed.then(|| self.dataset.fetch(self.device, self.dtype, split, samples)).transpose()?)
    }

    /// What a chunk reads: what the chunk before made, or samples.
    fn input(&self, made: Option<Tensor>, batch: &Option<Fetched>) -> Result<Tensor> {
        let samples =
            || batch.as_ref().expect("the first chunk has read them").inputs(self.device, self.dtype);
        Ok(made.map_or_else(samples, Ok)?)
    }

    fn targets(&self, batch: &Option<Fetched>) -> Result<Tensor> {
        Ok(batch.as_ref().expect("the last chunk has read them").targets(self.device)?)
    }

    fn positions(&self, batch: &Option<Fetched>) -> Result<Option<Tensor>> {
        Ok(batch.as_ref().map(|batch| batch.positions(self.device)).transpose()?.flatten())
    }

    fn recv_buffer(&self, message: &StageMessage, samples: usize) -> Result<Tensor> {
        self.stage.recv_buffer(message, samples, self.device, self.dtype)
    }
}

/// Takes a micro-batch forward and back.
struct GradientWorker<'a> {
    no_update_pass: NoUpdatePass<'a>,
    batch: Option<Fetched>,
    samples: usize,
    /// Targets that do not count.
    ignored: usize,
    loss: LossConfig,
    batch_slice: &'a BatchSlice,
    in_flight: HashMap<(usize, usize), InFlightMicroBatch>,
    statistics: &'a mut Vec<BatchStatistics>,
    sink: &'a mut dyn GradientSink,
    totals: Totals,
}

impl ActionWorker for GradientWorker<'_> {
    fn forward(&mut self, work: ChunkWork, input: Option<Tensor>) -> Result<Option<Tensor>> {
        let (no_update_pass, model) = (self.no_update_pass, self.no_update_pass.stage.model(work.chunk));
        let inputs = no_update_pass.input(input, &self.batch)?;
        let targets = if model.is_last() { Some(no_update_pass.targets(&self.batch)?) } else { None };
        let (batch_slice, random) = (*self.batch_slice, self.loss.random);
        let positions = no_update_pass.positions(&self.batch)?;
        let (mut micro_batch_state, sent) = InFlightMicroBatch::forward(
            model,
            no_update_pass.weights,
            inputs,
            targets,
            positions,
            batch_slice,
            random,
        )?;
        self.statistics.append(&mut micro_batch_state.statistics);
        self.in_flight.insert((work.micro_batch, work.chunk), micro_batch_state);
        Ok(sent)
    }

    fn backward(
        &mut self,
        work: ChunkWork,
        dy: Option<Tensor>,
        with_weights: bool,
    ) -> Result<Option<Tensor>> {
        debug_assert!(with_weights, "such a pass makes all gradients of weights");
        let mut micro_batch_state =
            self.in_flight.remove(&(work.micro_batch, work.chunk)).expect("a forward came before");
        let model = self.no_update_pass.stage.model(work.chunk);
        let weights = self.no_update_pass.weights;
        let output = micro_batch_state.backward(model, weights, dy, self.loss, self.sink)?;
        if let Some((total, predictions)) = output.total {
            // Every copy of the model sees the same samples.
            self.totals = Totals::of(total.read()?, predictions - self.ignored);
        }
        Ok(output.gradient)
    }

    fn recv_buffer(&mut self, message: &StageMessage) -> Result<Tensor> {
        self.no_update_pass.recv_buffer(message, self.samples)
    }
}

/// Takes micro-batches forward: observed, or evaluated.
struct ForwardWorker<'a, 'b> {
    no_update_pass: NoUpdatePass<'a>,
    /// Of each micro-batch, where this rank reads samples.
    batches: Vec<Option<Fetched>>,
    micro_batches: &'a [PassMicroBatch<'a>],
    /// Targets of each that do not count.
    ignored: Vec<usize>,
    observer: Option<&'b mut dyn InputObserver>,
    totals: Totals,
}

impl ActionWorker for ForwardWorker<'_, '_> {
    fn forward(&mut self, work: ChunkWork, input: Option<Tensor>) -> Result<Option<Tensor>> {
        let (no_update_pass, batch) = (self.no_update_pass, &self.batches[work.micro_batch]);
        let model = no_update_pass.stage.model(work.chunk);
        let PassMicroBatch { samples, counts } = self.micro_batches[work.micro_batch];
        let batch_slice = BatchSlice { samples: samples.len(), ..BatchSlice::default() };
        let positions = no_update_pass.positions(batch)?;
        let mut pass = ForwardContext::new(no_update_pass.weights, Mode::Evaluate, 0, batch_slice);
        pass.positions = positions.as_ref();
        pass.observer = self.observer.as_deref_mut().filter(|_| counts).map(|observer| observer as _);
        let x = model.forward(no_update_pass.input(input, batch)?, &mut pass)?;
        if !model.is_last() {
            return Ok(Some(x));
        }
        if self.observer.is_some() {
            return Ok(None);
        }
        let targets = no_update_pass.targets(batch)?;
        let total = model.evaluate(&x, &targets, no_update_pass.weights)?;
        if counts {
            self.totals.add(Totals::of(total, targets.len() - self.ignored[work.micro_batch]));
        }
        Ok(None)
    }

    fn recv_buffer(&mut self, message: &StageMessage) -> Result<Tensor> {
        self.no_update_pass.recv_buffer(message, self.micro_batches[message.micro_batch].samples.len())
    }
}
