//! Passes that change no weights, on the lists of [`Schedule::forward_only`] and [`Schedule::forward_and_backward`].

use std::collections::HashMap;

use espalier_comm::Communicator;
use espalier_data::{Dataset, Fetched, Split};
use espalier_nn::layers::{BatchSlice, BatchStatistics, Forward, GradientSink, InputObserver, Mode};
use espalier_nn::weights::WeightStore;
use espalier_plan::schedule::{Message, Schedule, Work};
use espalier_tensor::{DType, Device, Tensor};

use super::in_flight::InFlight;
use super::{Executor, Loss, Totals, Worker, side_of};
use crate::Result;
use crate::context::Context;
use crate::stage::Stage;

/// What such passes work on.
#[derive(Clone, Copy)]
pub struct Sweep<'a> {
    /// The layers: all, or those of this rank.
    pub stage: &'a Stage,
    /// The ranks of the pipeline.
    pub others: &'a Communicator,
    /// The weights that they are run with, which need not be those that train.
    pub weights: &'a dyn WeightStore,
    /// Where samples come from.
    pub dataset: &'a Dataset,
    /// The device that samples are sent to.
    pub device: &'a Device,
    /// The type that kernels compute in.
    pub dtype: DType,
}

impl<'a> Sweep<'a> {
    /// Passes of a rank with these weights.
    pub fn of(context: &'a Context, weights: &'a dyn WeightStore) -> Sweep<'a> {
        Sweep {
            stage: &context.stage,
            others: context.ranks.stages(),
            weights,
            dataset: &context.dataset,
            device: &context.device,
            dtype: context.dtype,
        }
    }
}

impl Sweep<'_> {
    /// Training samples forward and backward, a share of a step's: their gradients go to the sink, what batch norm saw to
    /// `statistics`.
    pub fn train(
        &self,
        samples: &[(u64, usize)],
        loss: Loss,
        share: &BatchSlice,
        statistics: &mut Vec<BatchStatistics>,
        sink: &mut dyn GradientSink,
    ) -> Result<Totals> {
        let batch = self.read(Split::Train, samples)?;
        let mut worker = Differentiating {
            sweep: *self,
            batch,
            samples: samples.len(),
            loss,
            share,
            in_flight: HashMap::new(),
            statistics,
            sink,
            totals: Totals::default(),
        };
        self.run(Schedule::forward_and_backward(self.stage.placement()), &mut worker)?;
        Ok(worker.totals)
    }

    /// Validation samples forward, `micro_batch` at a time, each rank running ahead of those behind it; what came of it is known
    /// where the model ends.
    pub fn evaluate(&self, samples: &[(u64, usize)], micro_batch: usize) -> Result<Totals> {
        self.forward_only(Split::Validation, samples, micro_batch, None)
    }

    /// Training samples forward, `micro_batch` at a time, as in evaluation: dropout passes, and batch norms use what they have measured. The
    /// observer sees what each linear layer of this rank reads, and no loss is made. Of a model in several copies one is run, so
    /// that each layer is seen once.
    pub fn observe(
        &self,
        samples: &[(u64, usize)],
        micro_batch: usize,
        observer: &mut dyn InputObserver,
    ) -> Result<()> {
        // As many micro-batches are under way as there are stages.
        let mut groups = samples.chunks(micro_batch * self.stage.placement().ranks());
        groups.try_for_each(|of| self.forward_only(Split::Train, of, micro_batch, Some(observer)).map(drop))
    }

    /// Who is observed is not judged.
    fn forward_only(
        &self,
        split: Split,
        samples: &[(u64, usize)],
        micro_batch: usize,
        observer: Option<&mut dyn InputObserver>,
    ) -> Result<Totals> {
        let micro_batches: Vec<&[(u64, usize)]> = samples.chunks(micro_batch).collect();
        let batches = micro_batches.iter().map(|samples| self.read(split, samples));
        let mut worker = ForwardOnly {
            sweep: *self,
            batches: batches.collect::<Result<_>>()?,
            samples: micro_batches.iter().map(|samples| samples.len()).collect(),
            ignored: micro_batches.iter().map(|of| self.dataset.ignored(split, of)).collect(),
            observer,
            totals: Totals::default(),
        };
        self.run(Schedule::forward_only(self.stage.placement(), micro_batches.len()), &mut worker)?;
        Ok(worker.totals)
    }

    fn run(&self, schedule: Schedule, worker: &mut dyn Worker) -> Result<()> {
        Executor::new(schedule, self.others.clone()).run_to_end(worker)
    }

    /// Samples, where they enter this rank's chunks or are judged there.
    fn read(&self, split: Split, samples: &[(u64, usize)]) -> Result<Option<Fetched>> {
        let mut models = (0..self.stage.chunks().len()).map(|chunk| self.stage.model(chunk));
        let needed = models.any(|model| model.is_first() || model.is_last());
        Ok(needed.then(|| self.dataset.fetch(self.device, self.dtype, split, samples)).transpose()?)
    }

    /// What a chunk reads: what the part before made, or samples.
    fn input(&self, made: Option<Tensor>, batch: &Option<Fetched>) -> Result<Tensor> {
        let samples = || batch.as_ref().expect("a first part has read them").inputs(self.device, self.dtype);
        Ok(made.map_or_else(samples, Ok)?)
    }

    fn targets(&self, batch: &Option<Fetched>) -> Result<Tensor> {
        Ok(batch.as_ref().expect("a last part has read them").targets(self.device)?)
    }

    fn room(&self, message: &Message, samples: usize) -> Result<Tensor> {
        self.stage.room(message.chunk, side_of(message), samples, self.device, self.dtype)
    }
}

/// Takes a micro-batch forward and back.
struct Differentiating<'a> {
    sweep: Sweep<'a>,
    batch: Option<Fetched>,
    samples: usize,
    loss: Loss,
    share: &'a BatchSlice,
    in_flight: HashMap<(usize, usize), InFlight>,
    statistics: &'a mut Vec<BatchStatistics>,
    sink: &'a mut dyn GradientSink,
    totals: Totals,
}

impl Worker for Differentiating<'_> {
    fn forward(&mut self, work: Work, input: Option<Tensor>) -> Result<Option<Tensor>> {
        let (sweep, model) = (self.sweep, self.sweep.stage.model(work.chunk));
        let inputs = sweep.input(input, &self.batch)?;
        let targets = if model.is_last() { Some(sweep.targets(&self.batch)?) } else { None };
        let (share, random) = (*self.share, self.loss.random);
        let (mut passing, sent) = InFlight::forward(model, sweep.weights, inputs, targets, share, random)?;
        self.statistics.append(&mut passing.statistics);
        self.in_flight.insert((work.micro_batch, work.chunk), passing);
        Ok(sent)
    }

    fn backward(&mut self, work: Work, gradient: Option<Tensor>, whole: bool) -> Result<Option<Tensor>> {
        debug_assert!(whole, "a sweep makes whole gradients");
        let mut passing =
            self.in_flight.remove(&(work.micro_batch, work.chunk)).expect("a forward came before");
        let model = self.sweep.stage.model(work.chunk);
        let returned = passing.backward(model, self.sweep.weights, gradient, self.loss, self.sink)?;
        if let Some((total, predictions)) = returned.total {
            // Every copy of the model sees the same samples.
            self.totals = Totals::of(total.read()?, predictions);
        }
        Ok(returned.gradient)
    }

    fn room(&mut self, message: &Message) -> Result<Tensor> {
        self.sweep.room(message, self.samples)
    }
}

/// Takes micro-batches forward: observed, or judged.
struct ForwardOnly<'a, 'b> {
    sweep: Sweep<'a>,
    /// Of each micro-batch, where this rank reads samples.
    batches: Vec<Option<Fetched>>,
    samples: Vec<usize>,
    /// Targets of each that do not count.
    ignored: Vec<usize>,
    observer: Option<&'b mut dyn InputObserver>,
    totals: Totals,
}

impl Worker for ForwardOnly<'_, '_> {
    fn forward(&mut self, work: Work, input: Option<Tensor>) -> Result<Option<Tensor>> {
        let (sweep, batch) = (self.sweep, &self.batches[work.micro_batch]);
        let model = sweep.stage.model(work.chunk);
        let share = BatchSlice { samples: self.samples[work.micro_batch], ..BatchSlice::default() };
        let mut pass = Forward::new(sweep.weights, Mode::Evaluate, 0, share);
        pass.observer = self.observer.as_deref_mut().map(|observer| observer as _);
        let x = model.forward(sweep.input(input, batch)?, &mut pass)?;
        if !model.is_last() {
            return Ok(Some(x));
        }
        if self.observer.is_some() {
            return Ok(None);
        }
        let targets = sweep.targets(batch)?;
        let total = model.evaluate(&x, &targets, sweep.weights)?;
        self.totals.add(Totals::of(total, targets.len() - self.ignored[work.micro_batch]));
        Ok(None)
    }

    fn room(&mut self, message: &Message) -> Result<Tensor> {
        self.sweep.room(message, self.samples[message.micro_batch])
    }
}
