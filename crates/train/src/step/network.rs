//! What the actions of a list do to a network: passes of its micro-batches, sums of their gradients, and the update.

use std::collections::HashMap;

use espalier_plan::Plan;
use espalier_plan::config::BatchNorm;
use espalier_plan::schedule::{Message, Payload, Updates, Work};
use espalier_tensor::ops::cross_entropy::Summed;
use espalier_tensor::ops::update::Step;
use espalier_tensor::{Category, DType, Device, Tensor, random};

use super::Worker;
use crate::Result;
use crate::checkpoint::Progress;
use crate::data::{Feed, Order, Samples};
use crate::layers::{Backward, BatchStatistics, Deferred, Forward, Mode, Outcome, Share, Stash};
use crate::parallel::Ranks;
use crate::parallel::data::Reducing;
use crate::parallel::groups::Groups;
use crate::parallel::zero::step_shared;
use crate::pass::{Loss, Totals};
use crate::stage::{Side, Stage};
use crate::state::{Gradients, Masks, NoiseScale, Optimizer};
use crate::weights::{ParameterId, Weights};

/// Micro-batches that are under way, and the weights that they began with.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    flights: HashMap<(usize, usize), Flight>,
    versions: HashMap<usize, Weights>,
    /// The number of the newest weights, counted from the beginning of the list.
    newest: usize,
}

impl Flights {
    /// Forgets the numbers of a list that is at its end.
    pub fn restart(&mut self) {
        debug_assert!(self.flights.is_empty(), "a list ends with nothing under way");
        *self = Flights::default();
    }
}

/// A micro-batch on its way through a chunk.
#[derive(Debug)]
struct Flight {
    stash: Stash,
    share: Share,
    /// What the head reads, where the chunk has it.
    read: Option<Tensor>,
    targets: Option<Tensor>,
    statistics: Vec<BatchStatistics>,
    put_off: Option<Deferred>,
}

/// What the steps of a list came to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Taken {
    pub totals: Totals,
    pub grad_norm: f64,
    /// Whether all of them changed the weights.
    pub taken: bool,
    /// Bytes of the gradients of candidates.
    pub gradient_bytes: usize,
}

/// What the passes and updates of a step work on.
pub(crate) struct Scene<'a> {
    pub plan: &'a Plan,
    pub stage: &'a Stage,
    pub groups: &'a Groups,
    pub ranks: Option<&'a Ranks>,
    pub feed: &'a Feed,
    pub order: &'a Order,
    pub device: &'a Device,
    pub dtype: DType,
    pub masks: &'a Masks,
    pub candidates: &'a [ParameterId],
    pub weights: &'a mut Weights,
    pub optimizer: &'a mut Optimizer,
    pub noise: &'a mut NoiseScale,
    pub progress: &'a mut Progress,
    pub flights: &'a mut Flights,
    /// Steps that had been taken before the list began.
    pub first_step: u64,
    pub updates: Updates,
    pub lr: f64,
    /// Parameters that are pulled towards zero, and how strongly.
    pub penalty: Option<(Vec<ParameterId>, f32)>,
}

impl Scene<'_> {
    /// Ranks along the data axis.
    fn replicas(&self) -> usize {
        self.ranks.map_or(1, |ranks| ranks.data().size())
    }
}

/// The network's own worker, for the actions of one step.
pub(crate) struct NetworkWorker<'a> {
    scene: Scene<'a>,
    sink: Reducing<'a>,
    /// Backward passes of each chunk before its gradients are whole.
    missing: Vec<usize>,
    /// Of the micro-batches that have ended, yet to be read: that waits for a card.
    sums: Vec<(Summed, usize)>,
    /// By micro-batch, so that running statistics do not depend on the order of the schedule.
    statistics: Vec<(usize, BatchStatistics)>,
    settled: Option<Settled<'a>>,
    pub outcome: Taken,
}

/// What the ranks have added up before a step.
struct Settled<'a> {
    gradients: Gradients<'a>,
    grad_norm: f64,
    /// Whether the step can be taken.
    finite: bool,
}

impl<'a> NetworkWorker<'a> {
    pub fn new(scene: Scene<'a>) -> NetworkWorker<'a> {
        let outcome = Taken { totals: Totals::default(), grad_norm: 0.0, taken: true, gradient_bytes: 0 };
        let sink = sink(&scene);
        let missing = missing(&scene);
        let (sums, statistics) = (Vec::new(), Vec::new());
        NetworkWorker { scene, sink, missing, sums, statistics, settled: None, outcome }
    }

    /// Where a micro-batch of the list stands: the number of its step, and its place among the step's own.
    fn place(&self, micro_batch: usize) -> (u64, usize) {
        let count = self.scene.plan.run.train.micro_batches;
        (self.scene.first_step + (micro_batch / count) as u64, micro_batch % count)
    }

    /// Where a micro-batch stands among the samples of its step.
    fn share(&self, micro_batch: usize) -> Share {
        let Scene { plan, ranks, .. } = &self.scene;
        let (batch, samples) = (plan.run.train.batch, plan.micro_batch);
        let own = ranks.map_or(0..batch, |ranks| ranks.part(batch));
        let synchronised = plan.run.parallel.batch_norm == BatchNorm::Synchronised;
        let norm_group = ranks.filter(|_| synchronised).map(|ranks| ranks.data().clone());
        Share { first: own.start + self.place(micro_batch).1 * samples, samples, norm_group }
    }

    /// The samples of a micro-batch: for the stages where they enter and where they are judged.
    fn samples(&self, micro_batch: usize) -> Samples {
        let (step, batch) = (self.place(micro_batch).0, self.scene.plan.run.train.batch as u64);
        let Share { first, samples, .. } = self.share(micro_batch);
        self.scene.order.indices(step * batch + first as u64, samples)
    }

    fn random(&self, micro_batch: usize) -> u64 {
        let (step, _) = self.place(micro_batch);
        random::key(random::key(self.scene.plan.run.seed, step), 0)
    }

    /// Samples whose mean is one step's loss.
    fn samples_of_a_step(&self) -> usize {
        let train = &self.scene.plan.run.train;
        match self.scene.updates {
            Updates::EveryMicroBatch => train.batch / train.micro_batches,
            // A rank that steps by itself takes the mean over its own samples.
            _ if self.scene.plan.run.parallel.is_local() => train.batch / self.scene.replicas(),
            _ => train.batch,
        }
    }

    /// Runs gradients of weights into the sink; the last ones of a chunk are whole.
    fn weigh(&mut self, chunk: usize, run: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.missing[chunk] -= 1;
        // Copies of a part send when they are told to: each sees other micro-batches.
        self.sink.last_micro_batch(self.missing[chunk] == 0 && !self.scene.groups.has_copies());
        run(self)
    }
}

fn sink<'a>(scene: &Scene<'a>) -> Reducing<'a> {
    let mut gradients = Gradients::new(scene.masks);
    if scene.plan.run.accumulates() {
        gradients = gradients.accumulating(scene.dtype);
    }
    // All parts know what is tied anywhere.
    let tied = scene.stage.model(0).tied();
    if scene.plan.run.train.noise_scale {
        gradients = gradients.measuring(tied.clone());
    }
    Reducing::new(gradients, scene.groups, tied).sharing(scene.plan.run.parallel.zero)
}

fn missing(scene: &Scene<'_>) -> Vec<usize> {
    let chunks = scene.stage.chunks().iter();
    match scene.updates {
        Updates::EveryMicroBatch => chunks.map(|_| 1).collect(),
        _ => chunks.map(|chunk| scene.stage.placement().routed(chunk.pipeline).count()).collect(),
    }
}

/// The weights of a version.
fn version<'b>(newest: &'b Weights, flights: &'b Flights, version: usize) -> &'b Weights {
    match version == flights.newest {
        true => newest,
        false => flights.versions.get(&version).expect("a list keeps the versions that it uses"),
    }
}

impl Worker for NetworkWorker<'_> {
    fn forward(&mut self, work: Work, input: Option<Tensor>) -> Result<Option<Tensor>> {
        let Work { micro_batch, chunk, .. } = work;
        let (share, random) = (self.share(micro_batch), self.random(micro_batch));
        let Scene { stage, feed, ref weights, ref flights, .. } = self.scene;
        let model = stage.model(chunk);
        let (mut inputs, mut targets) = (input, None);
        if model.is_first() || model.is_last() {
            let batch = feed.take(&self.samples(micro_batch))?;
            feed.prepare(|| self.samples(micro_batch + 1));
            if model.is_first() {
                inputs = Some(batch.inputs);
            }
            targets = Some(batch.targets).filter(|_| model.is_last());
        }
        let (mut stash, mut statistics) = (Stash::new(), Vec::new());
        let mut pass = Forward {
            weights: version(weights, flights, work.version),
            mode: Mode::Train,
            random,
            share: &share,
            stash: &mut stash,
            statistics: &mut statistics,
        };
        let x = model.forward(inputs.expect("samples, or what the part before made"), &mut pass)?;
        let (read, sent) = if model.is_last() { (Some(x), None) } else { (None, Some(x)) };
        let flight = Flight { stash, share, read, targets, statistics, put_off: None };
        self.scene.flights.flights.insert((micro_batch, chunk), flight);
        Ok(sent)
    }

    fn backward(&mut self, work: Work, gradient: Option<Tensor>, whole: bool) -> Result<Option<Tensor>> {
        let Work { micro_batch, chunk, .. } = work;
        let (random, samples) = (self.random(micro_batch), self.samples_of_a_step());
        let mut flight =
            self.scene.flights.flights.remove(&(micro_batch, chunk)).expect("a forward came before");
        self.statistics.extend(flight.statistics.drain(..).map(|measured| (micro_batch, measured)));
        let (mut put_off, mut sent) = (Deferred::default(), None);
        let run = |worker: &mut Self| {
            let Scene { stage, ref weights, ref flights, .. } = worker.scene;
            let model = stage.model(chunk);
            let mut pass = Backward {
                weights: version(weights, flights, work.version),
                random,
                share: &flight.share,
                stash: &mut flight.stash,
                sink: if whole { &mut worker.sink } else { &mut put_off },
            };
            let gradient = match (flight.read.take(), &flight.targets) {
                (Some(x), Some(targets)) => {
                    let loss = Loss { random, samples, temperature: 1.0 };
                    let scale = loss.scale(targets.len(), flight.share.samples);
                    let Outcome { total, gradient } = model.loss(x, targets, scale, &mut pass)?;
                    worker.sums.push((total, targets.len()));
                    gradient
                }
                _ => gradient.expect("the next part made it"),
            };
            sent = model.backward(gradient, &mut pass)?;
            Ok(())
        };
        if whole {
            self.weigh(chunk, run)?;
        } else {
            run(self)?;
            flight.put_off = Some(put_off);
            self.scene.flights.flights.insert((micro_batch, chunk), flight);
        }
        Ok(sent)
    }

    fn backward_weight(&mut self, work: Work) -> Result<()> {
        let key = (work.micro_batch, work.chunk);
        let flight = self.scene.flights.flights.remove(&key).expect("its input half came before");
        let put_off = flight.put_off.expect("its input half put them off");
        self.weigh(work.chunk, |worker| put_off.run(&mut worker.sink))
    }

    fn room(&mut self, message: &Message) -> Result<Tensor> {
        let Scene { plan, stage, device, dtype, .. } = self.scene;
        let side = match message.payload {
            Payload::Activation => Side::Input,
            Payload::Gradient => Side::Output,
        };
        stage.room(message.chunk, side, plan.micro_batch, device, dtype)
    }

    fn all_reduce(&mut self, chunk: usize) -> Result<()> {
        if !self.scene.groups.has_copies() {
            return self.sink.send_buckets();
        }
        let Scene { masks, ref weights, .. } = self.scene;
        let zeros = |id| {
            let weight = weights.get(id);
            let shape = masks.compressing(id).map_or(weight.shape().to_vec(), |mask| vec![mask.kept()]);
            Ok(Tensor::zeros(&weight.device(), &shape, weight.dtype(), Category::Gradients)?)
        };
        self.sink.send_all(self.scene.stage.parameters(chunk), zeros)
    }

    fn settle(&mut self) -> Result<()> {
        let fresh = sink(&self.scene);
        let mut gradients = std::mem::replace(&mut self.sink, fresh).finish()?;
        self.missing = missing(&self.scene);
        // All passes are queued; only now is a card waited for.
        for (sum, predictions) in self.sums.drain(..) {
            self.outcome.totals.add(Totals::of(sum.read()?, predictions));
        }
        let Scene { plan, groups, ranks, .. } = self.scene;
        let scene = &self.scene;
        for (id, strength) in
            scene.penalty.iter().flat_map(|(ids, strength)| ids.iter().map(|id| (*id, *strength)))
        {
            gradients.pull(id, scene.weights.get(id), strength)?;
        }
        let parallel = &plan.run.parallel;
        let mut squares = match parallel.zero {
            true => gradients.squared_norm()?,
            false => gradients.squared_norm_of(|id| groups.speaks_for(id))?,
        };
        let mut finite = true;
        if scene.updates == Updates::Flush {
            let totals = &mut self.outcome.totals;
            if let Some(ranks) = ranks {
                let own = match (parallel.zero, parallel.is_local()) {
                    // Each has its parts.
                    (true, _) => squares,
                    // Each has a gradient of its own; that it is finite matters to all.
                    (_, true) => squares / ranks.data().size() as f64,
                    // Replicas have the same gradients: the first ones speak for all.
                    _ if ranks.data().rank() == 0 => squares,
                    _ => 0.0,
                };
                let all = ranks.sum([vec![own], totals.to_numbers()].concat())?;
                squares = all[0];
                *totals = Totals::from_numbers(&all[1..]);
            }
            finite = totals.loss().is_finite();
        }
        let grad_norm = squares.sqrt();
        self.settled = Some(Settled { gradients, grad_norm, finite: finite && grad_norm.is_finite() });
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let Settled { gradients, grad_norm, finite: taken } =
            self.settled.take().expect("a step is settled before it is taken");
        let Scene { plan, groups, ranks, masks, .. } = self.scene;
        let (scene, parallel) = (&mut self.scene, &plan.run.parallel);
        let mut statistics = std::mem::take(&mut self.statistics);
        if taken {
            let clip = plan.run.train.clip;
            let scale = if clip > 0.0 { (clip / grad_norm).min(1.0) } else { 1.0 };
            scene.progress.updates += 1;
            let number = scene.progress.updates;
            let step = Step { lr: scene.lr as f32, gradient_scale: scale as f32, number };
            match parallel.zero && !groups.is_empty() {
                false => scene.optimizer.step(scene.weights, masks, &gradients, step)?,
                true => step_shared(scene.optimizer, scene.weights, masks, &gradients, step, groups)?,
            }
            statistics.sort_by_key(|(micro_batch, _)| *micro_batch);
            for (_, measured) in statistics {
                measured.fold_into(scene.weights)?;
            }
            if plan.run.parallel.batch_norm == BatchNorm::Local || groups.has_copies() {
                groups.average_statistics(scene.weights)?;
            }
            if let Some((small, large)) = gradients.noise_norms()? {
                let (small, large) = match ranks {
                    Some(ranks) => {
                        let sums = ranks.sum(vec![small, large])?;
                        (sums[0], if parallel.zero { sums[1] } else { large })
                    }
                    None => (small, large),
                };
                let (batch, size) = (plan.run.train.batch as f64, plan.micro_batch as f64);
                // The parts were scaled by their share of the batch: undo that to get the gradient of a micro-batch's mean.
                scene.noise.observe(size, small * (batch / size), batch, large);
            }
        }
        scene.flights.newest += 1;
        self.outcome.grad_norm = grad_norm;
        self.outcome.taken &= taken;
        self.outcome.gradient_bytes = scene.candidates.iter().map(|id| gradients.bytes(*id)).sum();
        Ok(())
    }

    fn stash(&mut self, version: usize) -> Result<()> {
        let copy = self.scene.weights.version()?;
        self.scene.flights.versions.insert(version, copy);
        Ok(())
    }

    fn forget(&mut self, version: usize) {
        self.scene.flights.versions.remove(&version);
    }
}
