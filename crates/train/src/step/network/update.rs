//! The update: what ranks all-reduce and send each other before it, and what it changes.

use std::sync::atomic::Ordering;

use espalier_comm::Reduce;
use espalier_nn::layers::BatchStatistics;
use espalier_nn::weights::ParameterId;
use espalier_plan::schedule::{ControlKind, Updates};
use espalier_tensor::Tensor;
use espalier_tensor::ops::update::StepParams;

use super::{NetworkWorker, StepContext, StepOutcome};
use crate::Result;
use crate::context::TrainContext;
use crate::parallel::statistics::fold_together;
use crate::step::Totals;

/// What the ranks have found before a step.
pub(super) struct GlobalNorm {
    grad_norm: f64,
    /// Whether the step can be taken, as far as this rank knows.
    finite: bool,
    /// The sum of squared norms over micro-batches, and of their sum, where noise is measured.
    noise: Option<(f64, f64)>,
}

/// An update that waits for the first stage's decision: 2BW's stages behind it.
#[derive(Debug)]
pub(super) struct DeferredUpdate {
    gradients: Vec<(ParameterId, Tensor)>,
    grad_norm: f64,
    /// Whether all stages found it finite, once that was received.
    finite: bool,
    lr: f64,
    statistics: Vec<(usize, BatchStatistics)>,
}

impl NetworkWorker<'_> {
    /// Adds up losses and norms over the ranks that can wait for each other: all, with whether one is asked
    /// to stop, where a flush ends a batch; otherwise the replicas of the stage where the model ends add up
    /// their losses, and stages send each other what they found.
    pub(super) fn agree(&mut self) -> Result<()> {
        let StepContext { context: TrainContext { ranks, .. }, local, .. } = self.step;
        let params = &*self.step.params;
        let mut squares = self.data_parallel.squared_norm(params)?;
        let noise = self.noise.as_mut().map(|noise| noise.finish(params)).transpose()?;
        // All passes were queued before a GPU was waited for, and the norm behind them: what is left is to
        // fetch the loss.
        let mut totals = Totals::default();
        for (sum, predictions) in self.losses.drain(..) {
            totals.add(Totals::of(sum.read()?, predictions));
        }
        let flushes = self.step.updates == Updates::Flush;
        let has_loss = flushes || ranks.stages().rank() + 1 == ranks.stages().size();
        if flushes && !local {
            // Each has its shard, or replicas have the same gradients: then the first one counts for all.
            let owned = self.data_parallel.splits_gradients() || ranks.data().rank() == 0;
            let counted_squares = if owned { squares } else { 0.0 };
            let counted = if ranks.counts_losses() { totals } else { Totals::default() };
            let stop = f64::from(u8::from(self.step.stop.load(Ordering::Relaxed)));
            let all = ranks.all_reduce_sum([vec![counted_squares, stop], counted.to_numbers()].concat())?;
            (squares, totals) = (all[0], Totals::from_numbers(&all[2..]));
            self.outcome.stop = all[1] > 0.0;
        } else if !flushes {
            // What ranks have of the same layers they step together.
            squares = ranks.model_parallel().all_reduce(vec![squares], Reduce::Sum)?[0];
        }
        if !flushes && has_loss {
            totals = Totals::from_numbers(&ranks.data().all_reduce(totals.to_numbers(), Reduce::Sum)?);
        }
        let grad_norm = squares.sqrt();
        let finite = grad_norm.is_finite() && (!has_loss || totals.loss().is_finite());
        self.outcome.totals.add(totals);
        self.global_norm = Some(GlobalNorm { grad_norm, finite, noise });
        Ok(())
    }

    /// The numbers of a control message that this rank sends.
    pub(super) fn scalars_of(&self, kind: ControlKind) -> Vec<f64> {
        match kind {
            ControlKind::Verdict | ControlKind::Decision => {
                let global_norm = self.global_norm.as_ref().expect("ranks agree before they send");
                vec![f64::from(u8::from(global_norm.finite))]
            }
            ControlKind::Totals => self.outcome.totals.to_numbers(),
            ControlKind::Token => unreachable!("a step generates no text"),
        }
    }

    /// Takes in the numbers of a control message.
    pub(super) fn take_scalars(&mut self, kind: ControlKind, scalars: &[f64]) {
        match kind {
            ControlKind::Verdict => {
                self.global_norm.as_mut().expect("ranks agree before they receive").finite &=
                    scalars[0] > 0.0;
            }
            ControlKind::Decision => {
                self.step.pipeline.deferred_update.as_mut().expect("a step was deferred").finite =
                    scalars[0] > 0.0;
            }
            ControlKind::Totals => self.outcome.totals = Totals::from_numbers(scalars),
            ControlKind::Token => unreachable!("a step generates no text"),
        }
    }

    pub(super) fn step(&mut self) -> Result<()> {
        let global_norm = self.global_norm.take().expect("a step is agreed before it is taken");
        let (lr, statistics) = (self.step.lr, std::mem::take(&mut self.statistics));
        self.outcome.grad_norm = global_norm.grad_norm;
        let behind = self.step.context.ranks.stages().rank() > 0;
        if behind && self.step.updates == Updates::DoubleBuffered {
            let gradients = self.step.params.take_gradients();
            let GlobalNorm { grad_norm, finite, .. } = global_norm;
            self.step.pipeline.deferred_update =
                Some(DeferredUpdate { gradients, grad_norm, finite, lr, statistics });
        } else {
            self.update(global_norm, lr, statistics)?;
        }
        self.step.pipeline.newest += 1;
        Ok(())
    }

    /// Takes the update that was deferred, or skips it.
    pub(super) fn commit(&mut self) -> Result<()> {
        let deferred_update = self.step.pipeline.deferred_update.take().expect("a step was deferred");
        let DeferredUpdate { gradients, grad_norm, finite, lr, statistics } = deferred_update;
        // Those of the next update may be there already: they wait meanwhile.
        let next = self.step.params.take_gradients();
        self.set_gradients(gradients);
        self.update(GlobalNorm { grad_norm, finite, noise: None }, lr, statistics)?;
        self.set_gradients(next);
        Ok(())
    }

    fn set_gradients(&mut self, gradients: Vec<(ParameterId, Tensor)>) {
        for (id, gradient) in gradients {
            self.step.params.param_mut(id).gradient = Some(gradient);
        }
    }

    /// Takes over what the first stages have counted, which speak for all.
    pub(super) fn settle(&mut self) -> Result<()> {
        let StepContext { context: TrainContext { ranks, .. }, ref progress, stop, .. } = self.step;
        let counted = match ranks.stages().rank() {
            0 => [progress.updates, self.bad_steps()],
            _ => [0; 2],
        };
        let stop = u64::from(stop.load(Ordering::Relaxed));
        let all = ranks.all_reduce_max(vec![counted[0], counted[1], stop])?;
        (self.counts, self.outcome.stop) = (Some((all[0], all[1])), all[2] > 0);
        Ok(())
    }

    /// Gives all weights the values that the ranks have stepped; nothing, where the update was skipped.
    pub(super) fn gather(&mut self) -> Result<()> {
        self.data_parallel.gather(self.step.params)
    }

    /// What the steps came to; those that were skipped are counted.
    pub fn finish(self) -> StepOutcome {
        let counted = (self.step.progress.updates, self.bad_steps());
        (self.step.progress.updates, self.step.progress.bad_steps) = self.counts.unwrap_or(counted);
        self.outcome
    }

    /// Steps in a row, up to this one, that were not taken.
    fn bad_steps(&self) -> u64 {
        if self.outcome.taken { 0 } else { self.step.progress.bad_steps + 1 }
    }

    /// Takes an update, or skips it.
    fn update(
        &mut self,
        global_norm: GlobalNorm,
        lr: f64,
        statistics: Vec<(usize, BatchStatistics)>,
    ) -> Result<()> {
        let GlobalNorm { grad_norm, finite, noise } = global_norm;
        self.outcome.taken &= finite;
        if !finite {
            drop(self.step.params.take_gradients());
            return Ok(());
        }
        let StepContext { context: TrainContext { plan, ranks, model_parallel, .. }, .. } = self.step;
        let context = &mut self.step;
        let scale = plan.optimization.clip.map_or(1.0, |clip| (clip / grad_norm).min(1.0));
        context.progress.updates += 1;
        let number = context.progress.updates;
        let step = StepParams { lr: lr as f32, gradient_scale: scale as f32, number };
        if let Some(penalty) = &context.penalty {
            penalty.add_unclipped(context.params, scale)?;
        }
        self.data_parallel.step(context.params, context.optimizer, step, model_parallel)?;
        drop(context.params.take_gradients());
        if let Some((small, large)) = noise {
            let reduced = ranks.all_reduce_sum(vec![small, large])?;
            let large = match self.data_parallel.splits_gradients() {
                true => reduced[1],
                false => ranks.model_parallel().all_reduce(vec![large], Reduce::Sum)?[0],
            };
            let small = reduced[0];
            let (batch, size) = (plan.batch.samples as f64, plan.batch.micro_batch as f64);
            // Micro-batches were scaled by their fraction of the batch: undo that to get the gradient of a
            // micro-batch's mean.
            context.progress.noise.observe(size, small * (batch / size), batch, large);
        }
        self.fold(statistics)
    }

    /// Folds what the batch norms of an update have measured into their running statistics, in the order of
    /// micro-batches whatever the order of the schedule.
    fn fold(&mut self, mut measured: Vec<(usize, BatchStatistics)>) -> Result<()> {
        let (micro_batches, replicas) = (self.micro_batches_of_an_update(), self.step.replicas());
        let StepContext { context: TrainContext { plan, ranks, .. }, groups, .. } = self.step;
        let params = &mut *self.step.params;
        let is_ghost = plan.batch.norm_group.is_some();
        measured.sort_by_key(|(micro_batch, _)| *micro_batch);
        let several = groups.has_copies() || (is_ghost && replicas > 1 && !self.step.local);
        if !several {
            for (_, one) in &measured {
                one.fold_into(params.buffers_mut([one.mean_id, one.variance_id]))?;
            }
            if !plan.batch.synchronises_norms() {
                groups.average_statistics(params)?;
            }
            return Ok(());
        }
        // Copies of a stage have measured other micro-batches each, and replicas other groups of samples.
        let each = plan.batch.norm_group.map_or(1, |group| plan.batch.micro_batch / group);
        let before = if is_ghost { ranks.data().rank() * micro_batches * each } else { 0 };
        for (position, one) in &mut measured {
            *position = before + *position % micro_batches * each + one.group;
        }
        let (count, factor) = match is_ghost {
            true => (replicas * micro_batches * each, 1.0),
            // As without copies, running statistics are the mean over replicas.
            false => (micro_batches, 1.0 / replicas as f32),
        };
        fold_together(&measured, count, factor, groups, params)
    }

    /// How many micro-batches an update is made of.
    fn micro_batches_of_an_update(&self) -> usize {
        match self.step.updates {
            Updates::EveryMicroBatch => 1,
            _ => self.step.context.plan.batch.micro_batches,
        }
    }
}
