//! What the actions of a list do to a network: passes of its micro-batches, sums of their gradients, and the update.

mod verdict;

use std::collections::HashMap;

use espalier_plan::schedule::{Action, Message, Updates, Work};
use espalier_tensor::ops::cross_entropy::Summed;
use espalier_tensor::ops::elementwise::scale_into;
use espalier_tensor::ops::update::Step;
use espalier_tensor::{Category, Tensor, random};

use super::in_flight::InFlight;
use super::{Loss, Totals, Worker, side_of};
use crate::Result;
use crate::checkpoint::Progress;
use crate::context::Context;
use crate::data::Samples;
use crate::layers::{BatchSlice, BatchStatistics, Deferred, GradientSink};
use crate::parallel::data::Reducing;
use crate::parallel::groups::Groups;
use crate::parallel::statistics::fold_together;
use crate::parallel::zero::{Shared, gather_weights, step_shared};
use crate::state::{Gradients, Masks, Optimizer};
use crate::weights::{ParameterId, Weights};

/// Micro-batches that are under way, and the weights that they began with.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    flights: HashMap<(usize, usize), InFlight>,
    versions: HashMap<usize, Weights>,
    /// The number of the newest weights, counted from the beginning of the list.
    newest: usize,
    /// What makes them, while it waits for its verdict: 2BW's stages behind the first.
    waiting: Option<Waiting>,
}

/// An update that is taken unless a stage found a number in it that is not finite.
#[derive(Debug)]
struct Waiting {
    sums: Vec<(ParameterId, Tensor)>,
    grad_norm: f64,
    lr: f64,
    statistics: Vec<(usize, BatchStatistics)>,
}

impl Flights {
    /// Forgets the numbers of a list that is at its end.
    pub fn restart(&mut self) {
        debug_assert!(
            self.flights.is_empty() && self.waiting.is_none(),
            "a list ends with nothing under way"
        );
        *self = Flights::default();
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
}

/// What the passes and updates of a step work on.
pub(crate) struct StepContext<'a> {
    pub context: &'a Context,
    /// Who shares which parameter in this step.
    pub groups: &'a Groups,
    pub masks: &'a Masks,
    pub candidates: &'a [ParameterId],
    pub weights: &'a mut Weights,
    pub optimizer: &'a mut Optimizer,
    pub progress: &'a mut Progress,
    pub flights: &'a mut Flights,
    /// Steps that had been taken before the list began.
    pub first_step: u64,
    pub updates: Updates,
    /// Whether the rank steps by itself: its loss, its norm and whether they are finite are then its own.
    pub local: bool,
    pub lr: f64,
    /// The update whose gradient is made not finite, for a drill.
    pub fault: Option<u64>,
    /// Parameters that are pulled towards zero, and how strongly.
    pub penalty: Option<(Vec<ParameterId>, f32)>,
}

impl StepContext<'_> {
    /// Ranks along the data axis.
    fn replicas(&self) -> usize {
        self.context.ranks.data().size()
    }
}

/// The network's own worker, for the actions of one step.
pub(crate) struct NetworkWorker<'a> {
    scene: StepContext<'a>,
    sink: Reducing<'a>,
    /// Backward passes of each chunk before its gradients are whole.
    missing: Vec<usize>,
    /// Of the micro-batches that have ended, yet to be read: that waits for a card.
    sums: Vec<(Summed, usize)>,
    /// By micro-batch, so that running statistics do not depend on the order of the schedule.
    statistics: Vec<(usize, BatchStatistics)>,
    /// Sums over all ranks that share them, until these agree.
    reduced: Option<Gradients<'a>>,
    agreed: Option<Agreed<'a>>,
    /// This rank's parts of what has been stepped, until all have those of the others.
    stepped: Vec<Shared>,
    pub outcome: StepOutcome,
}

/// What the ranks have added up before a step.
struct Agreed<'a> {
    gradients: Gradients<'a>,
    grad_norm: f64,
    /// Whether the step can be taken.
    finite: bool,
}

impl<'a> NetworkWorker<'a> {
    pub fn new(scene: StepContext<'a>) -> NetworkWorker<'a> {
        let outcome =
            StepOutcome { totals: Totals::default(), grad_norm: 0.0, taken: true, gradient_bytes: 0 };
        let sink = sink(&scene);
        let missing = missing(&scene);
        let (sums, statistics) = (Vec::new(), Vec::new());
        NetworkWorker {
            scene,
            sink,
            missing,
            sums,
            statistics,
            reduced: None,
            agreed: None,
            stepped: Vec::new(),
            outcome,
        }
    }

    /// Where a micro-batch of the list stands: the number of its step, and its place among the step's own.
    fn place(&self, micro_batch: usize) -> (u64, usize) {
        let count = self.scene.context.plan.batch.micro_batches;
        (self.scene.first_step + (micro_batch / count) as u64, micro_batch % count)
    }

    /// Where a micro-batch stands among the samples of its step.
    fn share(&self, micro_batch: usize) -> BatchSlice {
        let Context { plan, ranks, .. } = self.scene.context;
        let (batch, samples) = (plan.batch.samples, plan.batch.micro_batch);
        let own = ranks.part(batch);
        let synchronised = plan.batch.synchronises_norms();
        let norm_group = (synchronised && !ranks.is_alone()).then(|| ranks.data().clone());
        BatchSlice { first: own.start + self.place(micro_batch).1 * samples, samples, norm_group }
    }

    /// The samples of a micro-batch: for the stages where they enter and where they are judged.
    fn samples(&self, micro_batch: usize) -> Samples {
        let (step, batch) = (self.place(micro_batch).0, self.scene.context.plan.batch.samples as u64);
        let BatchSlice { first, samples, .. } = self.share(micro_batch);
        self.scene.context.order.indices(step * batch + first as u64, samples)
    }

    fn random(&self, micro_batch: usize) -> u64 {
        let (step, _) = self.place(micro_batch);
        random::key(random::key(self.scene.context.plan.seed, step), 0)
    }

    /// The number of the update that is next, from 0.
    fn update_number(&self) -> u64 {
        let each = match self.scene.updates {
            Updates::EveryMicroBatch => self.scene.context.plan.batch.micro_batches as u64,
            _ => 1,
        };
        self.scene.first_step * each + self.scene.flights.newest as u64
    }

    /// Samples whose mean is one step's loss.
    fn samples_of_a_step(&self) -> usize {
        let batch = &self.scene.context.plan.batch;
        match self.scene.updates {
            Updates::EveryMicroBatch => batch.samples / batch.micro_batches,
            // A rank that steps by itself takes the mean over its own samples.
            _ if self.scene.local => batch.samples / self.scene.replicas(),
            _ => batch.samples,
        }
    }

    /// Runs gradients of weights into the sink; the last ones of a chunk are whole.
    fn accumulate(&mut self, chunk: usize, run: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.missing[chunk] -= 1;
        // Copies of a part send when they are told to: each sees other micro-batches.
        self.sink.last_micro_batch(self.missing[chunk] == 0 && !self.scene.groups.has_copies());
        run(self)?;
        self.sink.end_micro_batch()
    }

    /// How many micro-batches an update is made of.
    fn micro_batches_of_an_update(&self) -> usize {
        match self.scene.updates {
            Updates::EveryMicroBatch => 1,
            _ => self.scene.context.plan.batch.micro_batches,
        }
    }

    /// Folds what the batch norms of an update have measured into their running statistics, in the order of micro-batches
    /// whatever the order of the schedule.
    fn fold(&mut self, mut measured: Vec<(usize, BatchStatistics)>) -> Result<()> {
        let (micro_batches, replicas) = (self.micro_batches_of_an_update(), self.scene.replicas());
        let StepContext { context: Context { plan, ranks, .. }, groups, .. } = self.scene;
        let weights = &mut *self.scene.weights;
        let is_ghost = plan.batch.norm_group.is_some();
        measured.sort_by_key(|(micro_batch, _)| *micro_batch);
        let several = groups.has_copies() || (is_ghost && replicas > 1 && !self.scene.local);
        if !several {
            measured.iter().try_for_each(|(_, one)| one.fold_into(weights))?;
            if !plan.batch.synchronises_norms() {
                groups.average_statistics(weights)?;
            }
            return Ok(());
        }
        // Copies of a part have measured other micro-batches each, and replicas other groups of samples.
        let each = plan.batch.norm_group.map_or(1, |group| plan.batch.micro_batch / group);
        let before = if is_ghost { ranks.data().rank() * micro_batches * each } else { 0 };
        for (place, one) in &mut measured {
            *place = before + *place % micro_batches * each + one.group;
        }
        let (count, factor) = match is_ghost {
            true => (replicas * micro_batches * each, 1.0),
            // As without copies, running statistics are the mean over replicas.
            false => (micro_batches, 1.0 / replicas as f32),
        };
        fold_together(&measured, count, factor, groups, weights)
    }

    /// Takes an update, or skips it.
    fn update(
        &mut self,
        agreed: Agreed<'_>,
        lr: f64,
        statistics: Vec<(usize, BatchStatistics)>,
    ) -> Result<()> {
        let Agreed { gradients, grad_norm, finite } = agreed;
        self.outcome.taken &= finite;
        if !finite {
            return Ok(());
        }
        let StepContext { context: Context { plan, ranks, .. }, groups, masks, .. } = self.scene;
        let (scene, sharded) = (&mut self.scene, plan.sharing.is_sharded());
        let scale = plan.optimization.clip.map_or(1.0, |clip| (clip / grad_norm).min(1.0));
        scene.progress.updates += 1;
        let number = scene.progress.updates;
        let step = Step { lr: lr as f32, gradient_scale: scale as f32, number };
        match sharded && !groups.is_empty() {
            false => scene.optimizer.step(scene.weights, masks, &gradients, step)?,
            true => {
                self.stepped = step_shared(scene.optimizer, scene.weights, masks, &gradients, step, groups)?;
            }
        }
        if let Some((small, large)) = gradients.noise_norms()? {
            let sums = ranks.sum(vec![small, large])?;
            let (small, large) = (sums[0], if sharded { sums[1] } else { large });
            let (batch, size) = (plan.batch.samples as f64, plan.batch.micro_batch as f64);
            // The parts were scaled by their share of the batch: undo that to get the gradient of a micro-batch's mean.
            scene.progress.noise.observe(size, small * (batch / size), batch, large);
        }
        self.fold(statistics)
    }
}

fn sink<'a>(scene: &StepContext<'a>) -> Reducing<'a> {
    let mut gradients = Gradients::new(scene.masks);
    if scene.context.plan.storage.accumulates {
        gradients = gradients.accumulating(scene.context.dtype);
    }
    // All parts know what is tied anywhere.
    let tied = scene.context.stage.model(0).tied();
    if scene.context.plan.optimization.noise_scale {
        gradients = gradients.measuring(tied.clone());
    }
    Reducing::new(gradients, scene.groups, tied).sharing(scene.context.plan.sharing.is_sharded())
}

fn missing(scene: &StepContext<'_>) -> Vec<usize> {
    let chunks = scene.context.stage.chunks().iter();
    match scene.updates {
        Updates::EveryMicroBatch => chunks.map(|_| 1).collect(),
        _ => chunks.map(|chunk| scene.context.stage.placement().routed(chunk.pipeline).count()).collect(),
    }
}

/// Makes a gradient one that is not finite, as an overflow would.
fn spoil(gradients: &mut Gradients<'_>) -> Result<()> {
    let first = gradients.ids().find_map(|id| Some((id, gradients.take(id)?)));
    if let Some((id, mut gradient)) = first {
        scale_into(&mut gradient, f32::NAN)?;
        gradients.put(id, gradient);
    }
    Ok(())
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
        let Work { micro_batch, chunk, version: needed } = work;
        if needed == self.scene.flights.newest {
            self.commit()?;
        }
        let (share, random) = (self.share(micro_batch), self.random(micro_batch));
        let StepContext { context: Context { stage, feed, .. }, ref weights, ref flights, .. } = self.scene;
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
        let inputs = inputs.expect("samples, or what the part before made");
        let weights = version(weights, flights, work.version);
        let (passing, sent) = InFlight::forward(model, weights, inputs, targets, share, random)?;
        self.scene.flights.flights.insert((micro_batch, chunk), passing);
        Ok(sent)
    }

    fn backward(&mut self, work: Work, gradient: Option<Tensor>, whole: bool) -> Result<Option<Tensor>> {
        let Work { micro_batch, chunk, version: needed } = work;
        if needed == self.scene.flights.newest {
            self.commit()?;
        }
        let loss =
            Loss { random: self.random(micro_batch), samples: self.samples_of_a_step(), temperature: 1.0 };
        let mut passing =
            self.scene.flights.flights.remove(&(micro_batch, chunk)).expect("a forward came before");
        self.statistics.extend(passing.statistics.drain(..).map(|measured| (micro_batch, measured)));
        let (mut put_off, mut sent) = (Deferred::default(), None);
        let run = |worker: &mut Self| {
            let StepContext { context: Context { stage, .. }, ref weights, ref flights, .. } = worker.scene;
            let (model, weights) = (stage.model(chunk), version(weights, flights, work.version));
            let sink: &mut dyn GradientSink = if whole { &mut worker.sink } else { &mut put_off };
            let returned = passing.backward(model, weights, gradient, loss, sink)?;
            worker.sums.extend(returned.total);
            sent = returned.gradient;
            Ok(())
        };
        if whole {
            self.accumulate(chunk, run)?;
        } else {
            run(self)?;
            passing.put_off = Some(put_off);
            self.scene.flights.flights.insert((micro_batch, chunk), passing);
        }
        Ok(sent)
    }

    fn room(&mut self, message: &Message) -> Result<Tensor> {
        let Context { plan, stage, device, dtype, .. } = self.scene.context;
        stage.room(message.chunk, side_of(message), plan.batch.micro_batch, device, *dtype)
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::BackwardWeight(work) => self.backward_weight(work),
            Action::AllReduce { chunk } => self.all_reduce(chunk),
            Action::WaitReduce => self.wait_reduce(),
            Action::Agree => self.agree(),
            Action::Step => self.step(),
            Action::Gather => self.gather(),
            Action::Stash { version } => self.stash(version),
            Action::Drop { version } => {
                self.scene.flights.versions.remove(&version);
                Ok(())
            }
            Action::Forward(_)
            | Action::Backward(_)
            | Action::BackwardInput(_)
            | Action::Send(_)
            | Action::Receive(_) => unreachable!("{action:?} is the executor's"),
        }
    }
}

impl NetworkWorker<'_> {
    fn backward_weight(&mut self, work: Work) -> Result<()> {
        let key = (work.micro_batch, work.chunk);
        let flight = self.scene.flights.flights.remove(&key).expect("its input half came before");
        let put_off = flight.put_off.expect("its input half put them off");
        self.accumulate(work.chunk, |worker| put_off.run(&mut worker.sink))
    }

    fn all_reduce(&mut self, chunk: usize) -> Result<()> {
        if !self.scene.groups.has_copies() {
            return self.sink.send_buckets();
        }
        let StepContext { masks, ref weights, .. } = self.scene;
        let zeros = |id| {
            let weight = weights.get(id);
            let shape = masks.compressing(id).map_or(weight.shape().to_vec(), |mask| vec![mask.kept()]);
            Ok(Tensor::zeros(&weight.device(), &shape, weight.dtype(), Category::Gradients)?)
        };
        self.sink.send_all(self.scene.context.stage.parameters(chunk), zeros)
    }

    /// Waits for the sums of this update's gradients.
    fn wait_reduce(&mut self) -> Result<()> {
        let fresh = sink(&self.scene);
        let mut gradients = std::mem::replace(&mut self.sink, fresh).finish()?;
        self.missing = missing(&self.scene);
        if self.scene.fault == Some(self.update_number()) {
            spoil(&mut gradients)?;
        }
        let scene = &self.scene;
        for (id, strength) in
            scene.penalty.iter().flat_map(|(ids, strength)| ids.iter().map(|id| (*id, *strength)))
        {
            gradients.add_l1(id, scene.weights.get(id), strength)?;
        }
        self.reduced = Some(gradients);
        Ok(())
    }

    /// Adds up losses and norms over the ranks, which agree whether the update can be taken.
    fn agree(&mut self) -> Result<()> {
        let gradients = self.reduced.take().expect("sums are waited for before");
        // All passes are queued; only now is a card waited for.
        let mut of_update = Totals::default();
        for (sum, predictions) in self.sums.drain(..) {
            of_update.add(Totals::of(sum.read()?, predictions));
        }
        self.outcome.totals.add(of_update);
        let StepContext { context: Context { plan, ranks, .. }, groups, .. } = self.scene;
        let scene = &self.scene;
        let sharded = plan.sharing.is_sharded();
        let mut squares = match sharded {
            true => gradients.squared_norm()?,
            false => gradients.squared_norm_of(|id| groups.is_owner(id))?,
        };
        let mut finite = true;
        if scene.updates == Updates::Flush {
            let totals = &mut self.outcome.totals;
            if !scene.local {
                // Each has its parts, or replicas have the same gradients: then the first ones speak for all.
                let speaks = sharded || ranks.data().rank() == 0;
                let own = if speaks { squares } else { 0.0 };
                let all = ranks.sum([vec![own], totals.to_numbers()].concat())?;
                squares = all[0];
                *totals = Totals::from_numbers(&all[1..]);
            }
            finite = totals.loss().is_finite();
        }
        let grad_norm = squares.sqrt();
        finite &= grad_norm.is_finite();
        if scene.updates != Updates::Flush {
            finite &= self.is_finite_everywhere(of_update)?;
            finite = self.pass_verdict(finite)?;
        }
        self.agreed = Some(Agreed { gradients, grad_norm, finite });
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let mut agreed = self.agreed.take().expect("a step is agreed before it is taken");
        let (lr, statistics) = (self.scene.lr, std::mem::take(&mut self.statistics));
        // Numbers of the step before it, if it still waits, come first.
        self.commit()?;
        self.outcome.grad_norm = agreed.grad_norm;
        let bytes = self.scene.candidates.iter().map(|id| agreed.gradients.bytes(*id));
        self.outcome.gradient_bytes = bytes.sum();
        let behind = self.scene.context.ranks.relay().rank() > 0;
        if behind && self.scene.updates == Updates::DoubleBuffered {
            let ids = agreed.gradients.ids();
            let sums = ids.filter_map(|id| Some((id, agreed.gradients.take(id)?))).collect();
            let grad_norm = agreed.grad_norm;
            self.scene.flights.waiting = Some(Waiting { sums, grad_norm, lr, statistics });
        } else {
            self.update(agreed, lr, statistics)?;
        }
        self.scene.flights.newest += 1;
        Ok(())
    }

    /// Gives all weights the values that the ranks have stepped; nothing, where the update was skipped.
    fn gather(&mut self) -> Result<()> {
        let stepped = std::mem::take(&mut self.stepped);
        let StepContext { masks, groups, .. } = self.scene;
        gather_weights(self.scene.weights, masks, &stepped, groups)
    }

    fn stash(&mut self, version: usize) -> Result<()> {
        self.commit()?;
        let copy = self.scene.weights.version()?;
        self.scene.flights.versions.insert(version, copy);
        Ok(())
    }
}
