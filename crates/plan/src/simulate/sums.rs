//! Sums of gradients: which ranks have summands of what, and how long their sums go on behind the backward pass that makes them.

use std::ops::Range;

use super::collective::Group;
use super::holdings::Weights;
use super::passes::{Passes, Seconds};
use super::rank_model::RankModel;
use super::{Candidate, Job};
use crate::engine::State;
use crate::schedule::Name;
use crate::stages::Parts;

/// Losses, counts and the norm of the gradient, which all ranks add up before a step.
const AGREED_BYTES: f64 = 48.0;

/// Who sums the gradients of a candidate's ranks.
pub(super) struct Sums<'a> {
    job: &'a Job<'a>,
    candidate: &'a Candidate,
    model: &'a RankModel,
    /// How many ranks of a replica have summands of a gradient: every number that there is. Other engines' papers have none but
    /// replicas.
    summands: Vec<u64>,
    /// Whether a gradient that several stages make is summed by itself, when all of them have.
    ties: bool,
    /// Copies of the model in a replica, each of which has a summand too.
    copies: usize,
}

impl<'a> Sums<'a> {
    pub fn new(job: &'a Job<'a>, candidate: &'a Candidate, model: &'a RankModel) -> Sums<'a> {
        let ours = job.engine.is_ours();
        let mut summands = if ours { model.peers.summands.clone() } else { vec![1] };
        summands.sort_unstable();
        summands.dedup();
        let doubled = matches!(candidate.schedule, Name::Chimera | Name::ChimeraDoubling);
        let copies = if ours && doubled && candidate.pipeline > 1 { 2 } else { 1 };
        Sums { job, candidate, model, summands, ties: ours && candidate.pipeline > 1, copies }
    }

    /// The replicas of so many ranks each.
    fn sharers(&self, summands: u64) -> Group<'a> {
        let near = self.candidate.tensor * self.candidate.spatial();
        let stride = match self.candidate.data {
            _ if summands > 1 => 1,
            // From a stage to the one that has its other copy, on the mean.
            1 if self.copies > 1 => (near * self.candidate.pipeline / self.copies).max(1),
            _ => near,
        };
        Group::new(self.job.cluster, self.candidate.data * summands as usize * self.copies, stride)
            .among(self.candidate.ranks())
    }

    /// What of a device's computing these sums take while they run.
    pub fn occupies(&self) -> f64 {
        self.sharers(1).occupies()
    }

    /// Bytes of a gradient that are summed.
    pub fn bytes(&self, weights: Weights) -> f64 {
        weights.stored
            * match self.job.engine.state {
                State::Exact => self.job.plan.storage.precision.size() as f64,
                State::Bytes { summed, .. } => summed,
            }
    }

    fn seconds(&self, group: &Group, weights: Weights) -> f64 {
        let bytes = self.bytes(weights) / self.job.engine.sum_rate;
        if self.candidate.zero == 0 { group.all_reduce(bytes) } else { group.gather(bytes) }
    }

    /// Of some blocks, whose weights are `weights` where replicas alone share them.
    fn of_blocks(&self, blocks: Range<usize>, weights: impl Fn() -> Weights) -> f64 {
        if self.summands == [1] && !self.ties {
            return self.seconds(&self.sharers(1), weights());
        }
        let RankModel { holdings, peers, tensors, .. } = self.model;
        let each = self.summands.iter().map(|number| {
            let own = |place: usize| {
                let tied = self.ties && tensors.tied.contains(&place);
                !tied && (self.summands == [1] || peers.summands[place] == *number)
            };
            let weights = holdings.weights_where(blocks.clone(), self.candidate.compressed, own);
            self.seconds(&self.sharers(*number), weights)
        });
        each.sum()
    }

    /// How long the sums of a part go on behind the backward pass that makes their summands, block by block from the last.
    pub fn behind(
        &self,
        part: Range<usize>,
        weights: Weights,
        passes: &Passes,
        blocks: &[Passes],
    ) -> Seconds {
        let all = self.of_blocks(part.clone(), || weights);
        let group = self.sharers(self.summands.last().copied().unwrap_or(1));
        // Copies of a part are complete at different times, and start their sums when the list says so.
        if !self.job.engine.overlaps_sums || all == 0.0 || self.copies > 1 {
            return Seconds::meeting(&group, all);
        }
        let backward = passes.backward().total();
        let (mut made, mut sent) = (0.0, 0.0_f64);
        for block in part.rev() {
            made += blocks[block].backward().total();
            let weights = || self.model.holdings.weights(block..block + 1, self.candidate.compressed);
            sent = sent.max(made) + self.of_blocks(block..block + 1, weights);
        }
        let late = (sent - made).clamp(0.0, all);
        Seconds::meeting(&group, late + (all - late).min(backward) * group.occupies())
    }

    /// Of each part what it takes to sum the gradients that it makes together with other stages; nothing hides it.
    pub fn tied(&self, parts: &Parts) -> Vec<Seconds> {
        let mut found = vec![Seconds::default(); parts.len()];
        if !self.ties {
            return found;
        }
        let RankModel { holdings, tensors, .. } = self.model;
        for place in &tensors.tied {
            let uses = |part: &usize| tensors.blocks.parameters(parts[*part].clone()).contains(place);
            let users: Vec<usize> = (0..parts.len()).filter(uses).collect();
            let Candidate { data, pipeline, tensor, compressed, .. } = *self.candidate;
            let near = tensor * self.candidate.spatial();
            // From the first stage to the last.
            let stride = (near * pipeline / users.len()).max(1);
            let group =
                Group::new(self.job.cluster, data * users.len(), stride).among(self.candidate.ranks());
            let weights =
                holdings.weights_where(parts[users[0]].clone(), compressed, |other| other == *place);
            let sum = Seconds::meeting(&group, self.seconds(&group, weights));
            users.into_iter().for_each(|part| found[part] = found[part] + sum);
        }
        found
    }

    /// What all ranks take to agree on a step.
    pub fn agreement(&self) -> Seconds {
        let world = Group::new(self.job.cluster, self.candidate.ranks(), 1).among(self.candidate.ranks());
        let seconds = if self.job.engine.is_ours() { world.all_reduce(AGREED_BYTES) } else { 0.0 };
        Seconds::meeting(&world, seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::super::passes::Seconds;
    use super::*;
    use crate::cluster::builtin;
    use crate::config::RunFile;
    use crate::engine::Engine;
    use crate::plan::{DataFacts, Plan};

    fn plan(model: &str, axis: &str) -> Plan {
        let text = format!("[model]\n{model}\n[train]\nsteps = 1\nbatch = 8\n[parallel]\n{axis} = 2\n");
        let facts = DataFacts { vocab: Some(256), image: Some((32, 32, 3)), classes: Some(10) };
        Plan::new(RunFile::parse(&text, &[]).unwrap(), facts).unwrap()
    }

    fn with_sums<R>(plan: &Plan, ask: impl FnOnce(&Sums) -> R) -> R {
        let cluster = builtin("summit").unwrap();
        let (job, candidate) = (Job::new(plan, &cluster, Engine::ESPALIER), Candidate::of(plan).unwrap());
        let model = job.local(&candidate).unwrap();
        ask(&Sums::new(&job, &candidate, &model))
    }

    /// Tiles have summands of the gradients of all convolutions, and of the head's none: less is summed than by replicas, but not nothing.
    #[test]
    fn tiles_sum_gradients_as_replicas_do() {
        let seconds = |axis| {
            let plan = plan("name = \"resnet8\"", axis);
            let blocks = plan.model.blocks.len();
            with_sums(&plan, |sums| {
                sums.of_blocks(0..blocks, || sums.model.holdings.weights(0..blocks, false))
            })
        };
        let [replicas, tiles] = ["data", "spatial"].map(seconds);
        assert!(tiles > 0.9 * replicas && tiles < replicas, "{tiles} {replicas}");
    }

    /// The table that the first stage reads and the last multiplies by is summed between these two.
    #[test]
    fn a_tied_table_is_summed_over_its_stages() {
        let gpt = "name = \"gpt\"\nlayers = 4\nwidth = 64\nheads = 4\ncontext = 16";
        let tied = |plan: &Plan| with_sums(plan, |sums| sums.tied(&plan.parts));
        let stages = plan(gpt, "pipeline");
        let found = tied(&stages);
        let link = builtin("summit").unwrap();
        let table = Group::new(&link, 2, 1).all_reduce(4.0 * 256.0 * 64.0);
        assert!(found.iter().all(|sum| (sum.exchange - table).abs() < 1e-12), "{found:?} {table}");
        assert_eq!(tied(&plan(gpt, "data")), [Seconds::default()]);
    }
}
