//! Gradient all-reduces: which ranks have partial sums of what, and how long the all-reduces go on behind the
//! backward pass that makes them.

use std::ops::Range;

use super::block_weights::WeightCounts;
use super::collective::RankGroup;
use super::passes::{PassSeconds, Passes};
use super::rank_model::RankModel;
use super::{Candidate, Simulation};
use crate::engine::EngineState;
use crate::schedule::ScheduleName;
use crate::stages::StageBlocks;

/// Losses, counts and the norm of the gradient, which all ranks add up before a step.
const AGREED_BYTES: f64 = 48.0;

/// Which ranks all-reduce which gradients of a candidate.
pub(super) struct GradientReductions<'a> {
    job: &'a Simulation<'a>,
    candidate: &'a Candidate,
    model: &'a RankModel,
    /// How many ranks of a replica have partial sums of a gradient: every number that there is. Other
    /// engines' papers have none but replicas.
    partial_ranks: Vec<u64>,
    /// Whether a gradient that several stages make is all-reduced by itself, when all of them have made it.
    ties: bool,
    /// Copies of the model in a replica, each of which has a partial sum too.
    copies: usize,
}

impl<'a> GradientReductions<'a> {
    pub fn new(
        job: &'a Simulation<'a>,
        candidate: &'a Candidate,
        model: &'a RankModel,
    ) -> GradientReductions<'a> {
        let ours = job.engine.is_ours();
        let mut partial_ranks = if ours { model.model_parallel.partial_ranks.clone() } else { vec![1] };
        partial_ranks.sort_unstable();
        partial_ranks.dedup();
        let doubled = matches!(candidate.schedule, ScheduleName::Chimera | ScheduleName::ChimeraDoubling);
        let copies = if ours && doubled && candidate.pipeline > 1 { 2 } else { 1 };
        GradientReductions {
            job,
            candidate,
            model,
            partial_ranks,
            ties: ours && candidate.pipeline > 1,
            copies,
        }
    }

    /// The ranks of all replicas that have partial sums, so many in each.
    fn sharers(&self, partial_ranks: u64) -> RankGroup<'a> {
        let model_parallel_ranks = self.candidate.tensor * self.candidate.spatial();
        let stride = match self.candidate.data {
            _ if partial_ranks > 1 => 1,
            // From a stage to the one that has its other copy, on the mean.
            1 if self.copies > 1 => (model_parallel_ranks * self.candidate.pipeline / self.copies).max(1),
            _ => model_parallel_ranks,
        };
        RankGroup::new(self.job.cluster, self.candidate.data * partial_ranks as usize * self.copies, stride)
            .among(self.candidate.ranks())
    }

    /// What of a device's computing these all-reduces take while they run.
    pub fn occupies(&self) -> f64 {
        self.sharers(1).occupies()
    }

    /// Bytes of a gradient that are all-reduced.
    pub fn bytes(&self, weights: WeightCounts) -> f64 {
        weights.stored
            * match self.job.engine.state {
                EngineState::Exact => self.job.plan.storage.precision.size() as f64,
                EngineState::Bytes { summed, .. } => summed,
            }
    }

    fn seconds(&self, group: &RankGroup, weights: WeightCounts) -> f64 {
        let bytes = self.bytes(weights);
        if self.candidate.zero == 0 { group.all_reduce(bytes) } else { group.gather(bytes) }
    }

    /// Seconds of the all-reduces of some blocks, whose weights are `weights` where replicas alone have
    /// partial sums.
    fn of_blocks(&self, blocks: Range<usize>, weights: impl Fn() -> WeightCounts) -> f64 {
        if self.partial_ranks == [1] && !self.ties {
            return self.seconds(&self.sharers(1), weights());
        }
        let RankModel { block_weights, model_parallel, tensors, .. } = self.model;
        let each = self.partial_ranks.iter().map(|number| {
            let reduced_here = |id: usize| {
                let tied = self.ties && tensors.tied.contains(&id);
                !tied && (self.partial_ranks == [1] || model_parallel.partial_ranks[id] == *number)
            };
            let weights =
                block_weights.weights_where(blocks.clone(), self.candidate.compressed, reduced_here);
            self.seconds(&self.sharers(*number), weights)
        });
        each.sum()
    }

    /// How long the all-reduces of a virtual stage go on behind the backward pass that makes their gradients,
    /// block by block from the last.
    pub fn behind(
        &self,
        virtual_stage: Range<usize>,
        weights: WeightCounts,
        passes: &Passes,
        blocks: &[Passes],
    ) -> PassSeconds {
        let all = self.of_blocks(virtual_stage.clone(), || weights);
        let group = self.sharers(self.partial_ranks.last().copied().unwrap_or(1));
        // Copies of a virtual stage are complete at different times, and start their all-reduces when the
        // list says so.
        if !self.job.engine.overlaps_all_reduce || all == 0.0 || self.copies > 1 {
            return PassSeconds::collective(&group, all);
        }
        let backward = passes.backward().total();
        let (mut made, mut sent) = (0.0, 0.0_f64);
        for block in virtual_stage.rev() {
            made += blocks[block].backward().total();
            let weights = || self.model.block_weights.weights(block..block + 1, self.candidate.compressed);
            sent = sent.max(made) + self.of_blocks(block..block + 1, weights);
        }
        let exposed = (sent - made).clamp(0.0, all);
        PassSeconds::collective(&group, exposed + (all - exposed).min(backward) * group.occupies())
    }

    /// Of each virtual stage what it takes to all-reduce the gradients that it makes together with other stages;
    /// nothing hides it.
    pub fn tied(&self, stage_blocks: &StageBlocks) -> Vec<PassSeconds> {
        let mut found = vec![PassSeconds::default(); stage_blocks.len()];
        if !self.ties {
            return found;
        }
        let RankModel { block_weights, tensors, .. } = self.model;
        for id in &tensors.tied {
            let uses = |virtual_stage: &usize| {
                tensors.blocks.parameters(stage_blocks[*virtual_stage].clone()).contains(id)
            };
            let users: Vec<usize> = (0..stage_blocks.len()).filter(uses).collect();
            let Candidate { data, pipeline, tensor, compressed, .. } = *self.candidate;
            let model_parallel_ranks = tensor * self.candidate.spatial();
            // From the first stage to the last.
            let stride = (model_parallel_ranks * pipeline / users.len()).max(1);
            let group =
                RankGroup::new(self.job.cluster, data * users.len(), stride).among(self.candidate.ranks());
            let weights =
                block_weights.weights_where(stage_blocks[users[0]].clone(), compressed, |other| other == *id);
            let all_reduce = PassSeconds::collective(&group, self.seconds(&group, weights));
            users
                .into_iter()
                .for_each(|virtual_stage| found[virtual_stage] = found[virtual_stage] + all_reduce);
        }
        found
    }

    /// What all ranks take to agree on a step.
    pub(crate) fn agreement(&self) -> PassSeconds {
        let world = RankGroup::new(self.job.cluster, self.candidate.ranks(), 1).among(self.candidate.ranks());
        let seconds = if self.job.engine.is_ours() { world.all_reduce(AGREED_BYTES) } else { 0.0 };
        PassSeconds::collective(&world, seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::super::passes::PassSeconds;
    use super::*;
    use crate::cluster::builtin;
    use crate::engine::EngineProfile;
    use crate::plan::Plan;

    fn plan(model: &str, axis: &str) -> Plan {
        let text = format!("[model]\n{model}\n[train]\nsteps = 1\nbatch = 8\n[parallel]\n{axis} = 2\n");
        Plan::of_text(&text)
    }

    fn with_reductions<R>(plan: &Plan, ask: impl FnOnce(&GradientReductions) -> R) -> R {
        let cluster = builtin("summit").unwrap();
        let (job, candidate) =
            (Simulation::new(plan, &cluster, EngineProfile::ESPALIER), Candidate::of(plan).unwrap());
        let model = job.local(&candidate).unwrap();
        ask(&GradientReductions::new(&job, &candidate, &model))
    }

    /// Tiles have partial sums of the gradients of all convolutions, and of the head's none: less is reduced
    /// than by replicas, but not nothing.
    #[test]
    fn tiles_all_reduce_gradients_as_replicas_do() {
        let seconds = |axis| {
            let plan = plan("name = \"resnet8\"", axis);
            let blocks = plan.model.blocks.len();
            with_reductions(&plan, |reductions| {
                reductions.of_blocks(0..blocks, || reductions.model.block_weights.weights(0..blocks, false))
            })
        };
        let [replicas, tiles] = ["data", "spatial"].map(seconds);
        assert!(tiles > 0.9 * replicas && tiles < replicas, "{tiles} {replicas}");
    }

    /// The table that the first stage reads and the last multiplies by is all-reduced between these two.
    #[test]
    fn a_tied_table_is_all_reduced_over_its_stages() {
        let gpt = "name = \"gpt\"\nlayers = 4\nwidth = 64\nheads = 4\ncontext = 16";
        let tied = |plan: &Plan| with_reductions(plan, |reductions| reductions.tied(&plan.stage_blocks));
        let stages = plan(gpt, "pipeline");
        let found = tied(&stages);
        let link = builtin("summit").unwrap();
        let table = RankGroup::new(&link, 2, 1).all_reduce(4.0 * 256.0 * 64.0);
        assert!(found.iter().all(|one| (one.communication - table).abs() < 1e-12), "{found:?} {table}");
        assert_eq!(tied(&plan(gpt, "data")), [PassSeconds::default()]);
    }
}
