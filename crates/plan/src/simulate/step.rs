//! One step of a candidate: how long it takes, and on what.

use std::rc::Rc;

use super::accuracy::{Accuracy, BestRun};
use super::breakdown::Breakdown;
use super::passes::{Passes, layer_passes};
use super::schedules::ScheduleKey;
use super::state;
use super::times::{StageTimes, StepCosts};
use super::{Candidate, Simulation};
use crate::error::Error;
use crate::memory::MemoryPlan;
use crate::schedule::{Schedule, ScheduleName, Timeline};
use crate::spec::{AttentionRole, RecomputeMode};
use crate::stages::StageBlocks;

/// What a candidate takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    pub candidate: Candidate,
    /// Bytes of the rank that has most.
    pub memory: MemoryPlan,
    /// Whether that fits into a device.
    pub fits: bool,
    /// Seconds of a step,
    pub step_seconds: f64,
    /// and how far such predictions were off; none where nothing of the kind was ever measured.
    pub accuracy: Option<Accuracy>,
    /// The published run that it would surpass, where nothing of the kind was ever measured: what it takes lies
    /// between [`Estimate::step_seconds`] and [`Estimate::slowest_seconds`].
    pub surpassed: Option<BestRun>,
    /// Of the devices' peak, with recomputed flops,
    pub percent_of_peak: f64,
    /// and without.
    pub model_percent_of_peak: f64,
    /// On what the time goes.
    pub breakdown: Breakdown,
}

impl Estimate {
    /// What it takes if it reaches no more of the peak than any published run did; the same as
    /// [`Estimate::step_seconds`] where it would not.
    pub fn slowest_seconds(&self) -> f64 {
        let times = self.surpassed.map_or(1.0, |best| self.percent_of_peak / best.percent_of_peak);
        self.step_seconds * times
    }
}

impl Simulation<'_> {
    /// What a candidate takes, or why it cannot be.
    pub fn estimate(&self, candidate: &Candidate) -> Result<Estimate, Error> {
        self.estimate_of(candidate, self.memory(candidate)?)
    }

    /// The same of one whose bytes are known.
    pub(crate) fn estimate_of(&self, candidate: &Candidate, memory: MemoryPlan) -> Result<Estimate, Error> {
        let lists = self.lists(candidate)?;
        let times = StageTimes::new(self, candidate, &lists.stage_blocks, lists.micro_batches)?;
        let node = &self.cluster.node;
        let spent = times.spent(&lists.schedule, lists.micro_batches as f64 / lists.listed as f64);
        let mut breakdown = spent * node.turns(candidate.ranks());
        breakdown.collective +=
            times.stalls(&lists.schedule, lists.micro_batches as f64 / lists.listed as f64);
        let walked = self.walked(candidate, &lists, &times, true)?;
        if candidate.pipeline > 1 {
            breakdown.point_to_point = walked - self.walked(candidate, &lists, &times, false)?;
        }
        let step_seconds = walked * self.cluster.straggle(candidate.ranks());
        breakdown.collective += step_seconds - walked;
        breakdown.bubble = (step_seconds - breakdown.total()).max(0.0);
        let devices = if node.cores { node.devices } else { candidate.ranks() };
        let peak = self.cluster.device.matrix(self.plan.storage.precision).peak() * devices as f64;
        let percent = |flops: f64| 100.0 * flops / (peak * step_seconds);
        let flops = |recompute| self.plan.model.train_flops(self.plan.batch.samples, recompute);
        let percent_of_peak = percent(flops(candidate.recompute)?);
        Ok(Estimate {
            candidate: *candidate,
            surpassed: self.surpassed(candidate, percent_of_peak),
            fits: memory.total() <= self.cluster.memory(),
            memory,
            step_seconds,
            accuracy: self.accuracy(candidate),
            percent_of_peak,
            model_percent_of_peak: percent(flops(RecomputeMode::None)?),
            breakdown,
        })
    }

    /// Every action of one replica's stages in virtual time, a rank of each: all micro-batches of a step,
    /// none left out. Where ranks take turns on cores, it is what each would do with a core of its own.
    pub fn timeline(&self, candidate: &Candidate) -> Result<Timeline, Error> {
        let micro_batches = self.micro_batches(candidate)?;
        let schedule = self.schedule(candidate, micro_batches)?;
        let stage_blocks = self.stage_blocks(schedule.placement.virtual_stages())?;
        walk(&schedule, &StageTimes::new(self, candidate, &stage_blocks, micro_batches)?, true)
    }

    /// Bytes of the rank that has most.
    pub fn memory(&self, candidate: &Candidate) -> Result<MemoryPlan, Error> {
        let StepLists { schedule, stage_blocks, micro_batches, .. } = self.lists(candidate)?;
        let model = self.local(candidate)?;
        state::memory(self, candidate, &model, &stage_blocks, &schedule, micro_batches)
    }

    /// Bytes that some rank has at least: its weights and their state, evenly sharded over stages.
    pub fn least_memory(&self, candidate: &Candidate) -> Result<u64, Error> {
        let model = self.local(candidate)?;
        let elements: u64 = model.local.parameters.iter().map(|parameter| parameter.elements()).sum();
        let (all, stages) = (elements as f64, candidate.pipeline as f64);
        let kept = match &self.plan.pruning {
            Some(pruning) if candidate.compressed => 1.0 - pruning.sparsity,
            _ => 1.0,
        };
        let stated = self.engine.state.with_moments(self.plan.storage.moments);
        let each = stated.bytes(1.0, kept, candidate.zero, candidate.data).unwrap_or_else(|| {
            let storage = &self.plan.storage;
            let (element, replicas) = (storage.precision.size() as f64, candidate.data as f64);
            // A gradient has at least the run's precision.
            let shared = if candidate.zero > 0 { replicas } else { 1.0 };
            let scattered = if candidate.zero > 1 { replicas } else { 1.0 };
            let gathered = if candidate.zero > 2 { replicas } else { 1.0 };
            let weights = if candidate.expands_weights() { kept * element } else { element };
            weights / gathered + kept * (element / scattered + storage.optimizer_bytes as f64 / shared)
        });
        Ok((all * each / stages) as u64)
    }

    /// Seconds of the passes of a micro-batch through the whole model, and how many micro-batches a replica has.
    pub(crate) fn micro_batch_seconds(&self, candidate: &Candidate) -> Result<(f64, usize), Error> {
        let passes: Passes = self.passes(candidate)?.iter().copied().sum();
        Ok((passes.forward.total() + passes.backward().total(), self.micro_batches(candidate)?))
    }

    /// What of the computing of a micro-batch is attention.
    pub(crate) fn attention_fraction(&self, candidate: &Candidate) -> Result<f64, Error> {
        let model = self.local(candidate)?;
        let (mut attention, mut all) = (0.0, 0.0);
        for timed in layer_passes(&model.local.model, &self.pass_context(candidate))?.into_iter().flatten() {
            let seconds = timed.passes.forward.compute + timed.passes.backward().compute;
            all += seconds;
            if timed.layer.properties().attention_role == AttentionRole::Core {
                attention += seconds;
            }
        }
        Ok(attention / all)
    }

    /// The lists of a candidate, shortened where a pipeline's rhythm repeats.
    fn lists(&self, candidate: &Candidate) -> Result<StepLists, Error> {
        let micro_batches = self.micro_batches(candidate)?;
        // It shows after a few rounds; longer lists add as much again for each micro-batch.
        let long = 3 * candidate.pipeline;
        // GPipe holds all of them at once.
        let repeats = candidate.schedule != ScheduleName::Gpipe || candidate.pipeline == 1;
        let listed = if repeats && micro_batches > 2 * long { long } else { micro_batches };
        let schedule = self.schedule(candidate, listed)?;
        let stage_blocks = self.stage_blocks(schedule.placement.virtual_stages())?;
        Ok(StepLists { schedule, stage_blocks, listed, micro_batches })
    }

    /// Seconds of a step, with or without messages between stages.
    fn walked(
        &self,
        candidate: &Candidate,
        lists: &StepLists,
        times: &StageTimes,
        messages: bool,
    ) -> Result<f64, Error> {
        let turns = self.cluster.node.turns(candidate.ranks());
        let end_of = |schedule: &Schedule| -> Result<f64, Error> {
            let timeline = walk(schedule, times, messages)?;
            if turns == 1.0 {
                return Ok(timeline.end);
            }
            let costs = StepCosts { times, schedule, messages };
            Ok(crowded(&timeline, &costs, turns / candidate.pipeline as f64))
        };
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
        candidate.micro_batches(batch).ok_or_else(|| {
            Error::conflict(
                "train.batch",
                format!(
                    "is {batch}, which {} replicas with micro-batches of {} cannot split evenly",
                    candidate.data, candidate.micro_batch
                ),
            )
        })
    }

    fn schedule(&self, candidate: &Candidate, micro_batches: usize) -> Result<Rc<Schedule>, Error> {
        let &Candidate { pipeline: stages, chunks, .. } = candidate;
        let name = if stages > 1 { candidate.schedule } else { ScheduleName::OneFOneB };
        self.schedules.of(ScheduleKey { name, stages, micro_batches, chunks })
    }
}

/// Lists in virtual time, with or without messages between stages.
fn walk(schedule: &Schedule, times: &StageTimes, messages: bool) -> Result<Timeline, Error> {
    Timeline::walk(schedule, &StepCosts { times, schedule, messages })
        .map_err(|error| Error::Ranks(error.to_string()))
}

/// How long lists last where ranks take turns on cores: a stretch of time in which more ranks work than there
/// are cores lasts as many times as long, and cores that have nothing to do behind a collective add to that.
/// `load` is the ranks of one stage over all cores: 0.5 where a stage of one rank works on two cores.
fn crowded(timeline: &Timeline, costs: &StepCosts, load: f64) -> f64 {
    // When a rank begins or ends to work, and for how many seconds of each of its own no core does.
    let mut changes: Vec<(f64, bool, f64)> = Vec::new();
    for (rank, spans) in timeline.spans.iter().enumerate() {
        for span in spans {
            let busy = span.busy;
            if busy > 0.0 {
                let stall = costs.stall(rank, &span.action) / busy;
                changes.extend([(span.end - busy, true, stall), (span.end, false, stall)]);
            }
        }
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut now, mut lasts) = (0.0, 0.0);
    let mut working: Vec<f64> = Vec::new();
    for (at, begins, stall) in changes {
        let idle = working.iter().copied().fold(0.0, f64::max);
        lasts += (at - now) * (f64::max(1.0, working.len() as f64 * load) + idle);
        now = at;
        match working.iter().position(|other| !begins && *other == stall) {
            Some(ended) => drop(working.swap_remove(ended)),
            None => working.push(stall),
        }
    }
    lasts
}

/// What a candidate's stages do.
struct StepLists {
    schedule: Rc<Schedule>,
    stage_blocks: Rc<StageBlocks>,
    /// Micro-batches in the lists,
    listed: usize,
    /// of so many.
    micro_batches: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Cluster, builtin};
    use crate::engine::EngineProfile;
    use crate::plan::Plan;

    /// Four ranks on two cores: replicas take twice as long as with a core each, stages less, since one works
    /// while another waits, but no less than their work.
    #[test]
    fn ranks_that_wait_leave_their_core_to_others() {
        let mut few = builtin("this-machine").unwrap();
        few.node.devices = 2;
        let link = few.node.link.as_mut().expect("two cores are joined");
        (link.meet_us, link.turn_us) = (0.0, 0.0);
        let many = {
            let mut many = few.clone();
            many.node.devices = 4;
            many
        };
        let seconds = |cluster: &Cluster, axis: &str| {
            let text = format!(
                "[model]\nname = \"gpt\"\nlayers = 4\nheads = 4\nwidth = 256\ncontext = 64\n[train]\nsteps = 1\nbatch = 16\n\
                 micro_batches = {}\n[parallel]\n{axis} = 4\n",
                if axis == "data" { 1 } else { 4 }
            );
            let plan = Plan::of_text(&text);
            let candidate = Candidate::of(&plan).unwrap();
            let found =
                Simulation::new(&plan, cluster, EngineProfile::ESPALIER).estimate(&candidate).unwrap();
            assert!((found.breakdown.total() / found.step_seconds - 1.0).abs() < 1e-9, "{found:?}");
            (found.step_seconds, found.breakdown.bubble)
        };
        let ((replicas, _), (replicas_of_two, _)) = (seconds(&many, "data"), seconds(&few, "data"));
        assert!((replicas_of_two / replicas - 2.0).abs() < 1e-9);
        let ((stages, idle), (stages_of_two, idle_of_two)) =
            (seconds(&many, "pipeline"), seconds(&few, "pipeline"));
        let ratio = stages_of_two / stages;
        assert!(ratio > 1.0 && ratio < 1.6, "{ratio}");
        assert!(
            stages_of_two >= 2.0 * (stages - idle) && idle_of_two < idle,
            "{stages_of_two} {stages} {idle} {idle_of_two}"
        );
    }
}
