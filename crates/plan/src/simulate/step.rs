//! One step of a candidate: how long it takes, and on what.

use std::rc::Rc;

use serde::Serialize;

use super::passes::Passes;
use super::schedules::Key;
use super::state;
use super::times::{StepCosts, Times};
use super::{Candidate, Job};
use crate::error::Error;
use crate::memory::Memory;
use crate::schedule::{Name, Schedule, Timeline};
use crate::spec::Recompute;
use crate::stages::Parts;

/// What a candidate takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The layout.
    pub candidate: Candidate,
    /// Bytes of the rank that has most.
    pub memory: Memory,
    /// Whether that fits into a device.
    pub fits: bool,
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Of the devices' peak, with recomputed flops,
    pub percent_of_peak: f64,
    /// and without.
    pub model_percent_of_peak: f64,
    /// On what the time goes.
    pub breakdown: Breakdown,
}

/// Where the seconds of a step go, on the mean over ranks. Together they are the step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Breakdown {
    /// Kernels of forward and backward passes, recomputation included.
    pub compute: f64,
    /// Messages between stages, as far as they are waited for.
    pub point_to_point: f64,
    /// Waiting for other stages.
    pub bubble: f64,
    /// Sums, gathers and halos, as far as they are waited for.
    pub collective: f64,
    /// Gradients into their sums, compressed or dense.
    pub compress: f64,
    /// The step itself.
    pub optimizer: f64,
}

impl Breakdown {
    /// All kinds, with what a person calls them.
    pub fn kinds(&self) -> [(&'static str, f64); 6] {
        [
            ("compute", self.compute),
            ("point-to-point", self.point_to_point),
            ("bubble", self.bubble),
            ("collectives", self.collective),
            ("compression", self.compress),
            ("optimizer", self.optimizer),
        ]
    }
}

impl Job<'_> {
    /// What a candidate takes, or why it cannot be.
    pub fn estimate(&self, candidate: &Candidate) -> Result<Estimate, Error> {
        let lists = self.lists(candidate)?;
        let memory = self.memory_of(candidate, &lists)?;
        let times = Times::new(self, candidate, &lists.parts, lists.micro_batches)?;
        let step_seconds = self.walked(candidate, &lists, &times, true)?;
        let mut breakdown = times.spent(&lists.schedule, lists.micro_batches as f64 / lists.listed as f64);
        if candidate.pipeline > 1 {
            breakdown.point_to_point = step_seconds - self.walked(candidate, &lists, &times, false)?;
        }
        let known = breakdown.kinds().iter().map(|(_, seconds)| seconds).sum::<f64>();
        breakdown.bubble = (step_seconds - known).max(0.0);
        let peak = self.cluster.device.matrix(self.plan.storage.precision).peak() * candidate.ranks() as f64;
        let percent = |flops: f64| 100.0 * flops / (peak * step_seconds);
        let flops = |recompute| self.plan.model.train_flops(self.plan.batch.samples, recompute);
        Ok(Estimate {
            candidate: *candidate,
            fits: memory.total() <= self.cluster.memory(),
            memory,
            step_seconds,
            percent_of_peak: percent(flops(candidate.recompute)?),
            model_percent_of_peak: percent(flops(Recompute::None)?),
            breakdown,
        })
    }

    /// Every action of one replica's stages in virtual time, a rank of each: all micro-batches of a step, none left out.
    pub fn timeline(&self, candidate: &Candidate) -> Result<Timeline, Error> {
        let micro_batches = self.micro_batches(candidate)?;
        let schedule = self.schedule(candidate, micro_batches)?;
        let parts = self.parts(schedule.placement.parts())?;
        walk(&schedule, &Times::new(self, candidate, &parts, micro_batches)?, true)
    }

    /// Bytes of the rank that has most.
    pub fn memory(&self, candidate: &Candidate) -> Result<Memory, Error> {
        self.memory_of(candidate, &self.lists(candidate)?)
    }

    /// Bytes that some rank has at least: its weights and their state, evenly shared out over stages.
    pub fn least_memory(&self, candidate: &Candidate) -> Result<u64, Error> {
        let local = self.local(candidate)?;
        let elements: u64 = local.parameters.iter().map(|parameter| parameter.elements()).sum();
        let (all, stages) = (elements as f64, candidate.pipeline as f64);
        let kept = match &self.plan.pruning {
            Some(pruning) if candidate.compressed => 1.0 - pruning.sparsity,
            _ => 1.0,
        };
        let each = self.engine.state.bytes(1.0, kept, candidate.zero, candidate.data).unwrap_or_else(|| {
            let storage = &self.plan.storage;
            let (element, replicas) = (storage.precision.size() as f64, candidate.data as f64);
            // A gradient has at least the run's precision.
            let shared = if candidate.zero > 0 { replicas } else { 1.0 };
            let scattered = if candidate.zero > 1 { replicas } else { 1.0 };
            element + kept * (element / scattered + storage.optimizer_bytes as f64 / shared)
        });
        Ok((all * each / stages) as u64)
    }

    /// Seconds of the passes of a micro-batch through the whole model, and how many micro-batches a replica has.
    pub fn micro_batch_seconds(&self, candidate: &Candidate) -> Result<(f64, usize), Error> {
        let passes: Passes = self.passes(candidate)?.iter().copied().sum();
        Ok((passes.forward.total() + passes.backward().total(), self.micro_batches(candidate)?))
    }

    fn memory_of(&self, candidate: &Candidate, lists: &Lists) -> Result<Memory, Error> {
        let local = self.local(candidate)?;
        state::memory(self, candidate, &local, &lists.parts, &lists.schedule, lists.micro_batches)
    }

    /// The lists of a candidate, shortened where a pipeline's rhythm repeats.
    fn lists(&self, candidate: &Candidate) -> Result<Lists, Error> {
        let micro_batches = self.micro_batches(candidate)?;
        // It shows after a few rounds; longer lists add as much again for each micro-batch.
        let long = 3 * candidate.pipeline;
        // GPipe holds all of them at once.
        let repeats = candidate.schedule != Name::Gpipe || candidate.pipeline == 1;
        let listed = if repeats && micro_batches > 2 * long { long } else { micro_batches };
        let schedule = self.schedule(candidate, listed)?;
        let parts = self.parts(schedule.placement.parts())?;
        Ok(Lists { schedule, parts, listed, micro_batches })
    }

    /// Seconds of a step, with or without messages between stages.
    fn walked(
        &self,
        candidate: &Candidate,
        lists: &Lists,
        times: &Times,
        messages: bool,
    ) -> Result<f64, Error> {
        let end_of = |schedule: &Schedule| walk(schedule, times, messages).map(|timeline| timeline.end);
        let end = end_of(&lists.schedule)?;
        if lists.listed == lists.micro_batches {
            return Ok(end);
        }
        let short = lists.listed - candidate.pipeline;
        let each = (end - end_of(&*self.schedule(candidate, short)?)?) / candidate.pipeline as f64;
        Ok(end + each * (lists.micro_batches - lists.listed) as f64)
    }

    fn micro_batches(&self, candidate: &Candidate) -> Result<usize, Error> {
        let batch = self.plan.batch.samples;
        candidate.micro_batches(batch).ok_or_else(|| Error::Conflict {
            field: "train.batch".into(),
            problem: format!(
                "is {batch}, which {} replicas with micro-batches of {} cannot share out",
                candidate.data, candidate.micro_batch
            ),
        })
    }

    fn schedule(&self, candidate: &Candidate, micro_batches: usize) -> Result<Rc<Schedule>, Error> {
        let &Candidate { pipeline: stages, chunks, .. } = candidate;
        let name = if stages > 1 { candidate.schedule } else { Name::OneFOneB };
        self.schedules.of(Key { name, stages, micro_batches, chunks })
    }
}

/// Lists in virtual time, with or without messages between stages.
fn walk(schedule: &Schedule, times: &Times, messages: bool) -> Result<Timeline, Error> {
    Timeline::walk(schedule, &StepCosts { times, schedule, messages })
        .map_err(|error| Error::Ranks(error.to_string()))
}

/// What a candidate's stages do.
struct Lists {
    schedule: Rc<Schedule>,
    parts: Rc<Parts>,
    /// Micro-batches in the lists,
    listed: usize,
    /// of so many.
    micro_batches: usize,
}
