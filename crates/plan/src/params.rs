//! The parameters of a model as one rank has them: made once, from the plan alone, for whoever splits,
//! reduces, counts, saves or steps them.
//!
//! A parameter belongs to the virtual stages that use it: one, or several where it is tied. Every copy of
//! such a stage, in every pipeline and every replica, makes a partial sum of its gradient. Of the ranks of
//! one model-parallel group those who hold the same shard of it do, if the layout says that each has a
//! partial sum; otherwise they have the same gradient already.

use std::collections::HashMap;
use std::mem::take;
use std::ops::Range;

use crate::error::Error;
use crate::mesh::Axis;
use crate::plan::Plan;
use crate::shard::Shard;
use crate::spec::Parameter;
use crate::split::GroupRank;

/// A parameter as one rank has it.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamPlan {
    /// Its position in [`ModelSpec::parameters`](crate::spec::ModelSpec::parameters).
    pub id: usize,
    /// As in a checkpoint.
    pub name: String,
    /// Which shard of it is here; of a parameter of another stage, which would be.
    pub shard: Shard,
    /// Whether a stage of this rank uses it.
    pub is_here: bool,
    /// Whether some of the ranks of one model-parallel group have less than all of it.
    pub is_split: bool,
    /// Which of [`RankParams::groups`] has the other partial sums of its gradient.
    pub group: usize,
    /// Which of the ranks that split its optimizer state this one is (ZeRO); the only one where each has all
    /// of it.
    pub zero: GroupRank,
    /// Whether they split its weight too: where the others of the group run the same blocks in the same order,
    /// which ranks of two pipeline stages do not.
    pub shards_weight: bool,
    /// Whether this rank speaks for its shard where each element must be counted once in a replica.
    pub is_owner: bool,
    /// Whether the first of the ranks that hold the same shard is this one, or in its group.
    pub is_first_copy: bool,
    /// Whether weight decay applies where biases and norm parameters are left out.
    pub decays: bool,
    /// Whether pruning may touch it; without pruning, whether it could.
    pub prunable: bool,
    /// The blocks that use it, ascending. Its weight must be dense while one of them runs forward, is
    /// recomputed or runs backward; a gradient of the weight alone, where backwards are split, needs it no
    /// longer.
    pub blocks: Vec<usize>,
    /// Whether several layers use it, so that its gradient is complete when the whole pass is.
    pub is_tied: bool,
}

/// Ranks that have partial sums of the same gradients: those at these stages, of these that are in the same
/// model-parallel group, in every replica.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GroupPlan {
    /// Ascending.
    pub stages: Vec<usize>,
    /// Ascending numbers among those of the same model-parallel group.
    pub peers: Vec<usize>,
}

/// All parameters and statistics of a model as one rank has them.
#[derive(Debug, Clone, PartialEq)]
pub struct RankParams {
    /// In the order of the model.
    pub params: Vec<ParamPlan>,
    /// The group of each running statistic: those that measure it, on other samples each.
    pub statistics: Vec<usize>,
    /// Who adds up gradients with this rank.
    pub groups: Vec<GroupPlan>,
    /// Of each group which of its ranks this one is; none where it is another stage's.
    pub members: Vec<Option<GroupRank>>,
}

impl Plan {
    /// What a rank has of each parameter, and with whom.
    pub fn params(&self, rank: usize) -> Result<RankParams, Error> {
        let coords = self.mesh.coordinates(rank);
        let (locals, index) = (self.layout.local_models(), self.layout.model_parallel_rank(coords));
        let placement = self.schedule(1)?.placement;
        let tensors = self.model.block_tensors();
        let parameters = self.model.parameters();
        let stages_of = |tensors: &dyn Fn(Range<usize>) -> Vec<usize>, count: usize| {
            let mut stages: Vec<Vec<usize>> = vec![Vec::new(); count];
            for (virtual_stage, blocks) in self.stage_blocks.iter().enumerate() {
                tensors(blocks.clone())
                    .into_iter()
                    .for_each(|id| stages[id].extend(placement.holders(virtual_stage)));
            }
            for stages in &mut stages {
                stages.sort_unstable();
                stages.dedup();
            }
            stages
        };
        let mut blocks: Vec<Vec<usize>> = vec![Vec::new(); parameters.len()];
        for block in 0..self.model.blocks.len() {
            tensors.parameters(block..block + 1).into_iter().for_each(|id| blocks[id].push(block));
        }
        let (mut groups, tied) = (GroupRegistry::default(), tensors.tied());
        let mut stages = stages_of(&|blocks| tensors.parameters(blocks), parameters.len());
        let param = |(id, parameter): (usize, Parameter)| {
            let (stages, blocks) = (take(&mut stages[id]), take(&mut blocks[id]));
            let shard = &locals[index].shards[id];
            let reduces_with = |peer: &usize| *peer == index || self.layout.are_reduced(id, index, *peer);
            let first = (0..index).find(|peer| locals[*peer].shards[id] == *shard).unwrap_or(index);
            ParamPlan {
                id,
                is_here: stages.contains(&coords.pipeline),
                is_split: locals.iter().any(|local| !local.shards[id].is_full()),
                is_owner: stages.first() == Some(&coords.pipeline) && first == index,
                is_first_copy: reduces_with(&first),
                decays: parameter.decays,
                prunable: self.pruning.as_ref().map_or(parameter.prunable, |prune| prune.covers(&parameter)),
                name: parameter.name,
                shard: shard.clone(),
                group: groups
                    .number(GroupPlan { stages, peers: (0..locals.len()).filter(reduces_with).collect() }),
                zero: GroupRank::SINGLE,
                shards_weight: false,
                blocks,
                is_tied: tied.contains(&id),
            }
        };
        let mut params: Vec<ParamPlan> = parameters.into_iter().enumerate().map(param).collect();
        // Statistics are measured on the same activations by all that have shards of the same layers.
        let measured = stages_of(&|blocks| tensors.buffers(blocks).collect(), self.model.buffers().len());
        let group = |stages| groups.number(GroupPlan { stages, peers: vec![index] });
        let statistics = measured.into_iter().map(group).collect();
        let groups = groups.list;
        let members: Vec<Option<GroupRank>> = groups.iter().map(|group| self.member(rank, group)).collect();
        if self.data_parallel.is_sharded() {
            for param in &mut params {
                param.zero = members[param.group].unwrap_or(GroupRank::SINGLE);
                let is_on_one_stage = groups[param.group].stages.len() == 1;
                param.shards_weight =
                    self.data_parallel.shards_weights() && is_on_one_stage && !param.zero.is_single();
            }
        }
        Ok(RankParams { params, statistics, groups, members })
    }

    /// Which of the ranks of a group a rank is, if it is one. They count stages slowest, then replicas, then
    /// those that have shards of the same layers. They are not listed: replicas may be millions.
    pub(crate) fn member(&self, rank: usize, group: &GroupPlan) -> Option<GroupRank> {
        let coords = self.mesh.coordinates(rank);
        let of = |all: &[usize], one: usize| {
            Some(GroupRank { ranks: all.len(), rank: all.iter().position(|of| *of == one)? })
        };
        let stages = of(&group.stages, coords.pipeline)?;
        let (peers, replicas) = (
            of(&group.peers, self.layout.model_parallel_rank(coords))?,
            self.mesh.rank_along(rank, &[Axis::Data]),
        );
        Some(GroupRank {
            ranks: stages.ranks * replicas.ranks * peers.ranks,
            rank: (stages.rank * replicas.ranks + replicas.rank) * peers.ranks + peers.rank,
        })
    }
}

/// Groups by what they are, numbered as they are met.
#[derive(Default)]
struct GroupRegistry {
    list: Vec<GroupPlan>,
    numbers: HashMap<GroupPlan, usize>,
}

impl GroupRegistry {
    fn number(&mut self, group: GroupPlan) -> usize {
        *self.numbers.entry(group).or_insert_with_key(|group| {
            self.list.push(group.clone());
            self.list.len() - 1
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunFile;
    use crate::plan::DataFacts;

    fn params(rest: &str, rank: usize) -> RankParams {
        let text = format!("[model]\nlayers = 2\nwidth = 16\nheads = 2\ncontext = 8\n{rest}");
        let facts = DataFacts { vocab: Some(100), ..DataFacts::default() };
        Plan::new(RunFile::parse(&text, &[]).unwrap(), facts).unwrap().params(rank).unwrap()
    }

    #[test]
    fn a_tied_table_belongs_to_both_ends_of_a_pipeline() {
        for rank in 0..4 {
            let RankParams { params, groups, members, .. } =
                params("[parallel]\npipeline = 2\ndata = 2\n[train]\nbatch = 4\nmicro_batches = 2", rank);
            let named = |name: &str| params.iter().find(|param| param.name == name).unwrap();
            let table = named("wte.weight");
            assert_eq!((table.is_here, table.is_tied, table.is_owner), (true, true, rank < 2));
            assert_eq!(groups[table.group].stages, [0, 1]);
            assert_eq!(members[table.group], Some(GroupRank { ranks: 4, rank }));
            let last = named("h.1.mlp.c_proj.weight");
            assert_eq!((last.is_here, last.is_tied, last.is_owner), (rank >= 2, false, rank >= 2));
            assert_eq!(members[last.group], (rank >= 2).then_some(GroupRank { ranks: 2, rank: rank % 2 }));
        }
    }

    /// Ranks of two stages come to it at different times: each keeps the weight.
    #[test]
    fn weights_are_sharded_where_one_stage_has_them() {
        for rank in 0..4 {
            let RankParams { params, .. } = params(
                "[parallel]\npipeline = 2\ndata = 2\nzero = 3\n[train]\nbatch = 4\nmicro_batches = 2",
                rank,
            );
            for param in params.iter().filter(|param| param.is_here) {
                assert_eq!(param.shards_weight, param.name != "wte.weight", "{}", param.name);
                assert_eq!(param.zero.ranks, if param.shards_weight { 2 } else { 4 }, "{}", param.name);
            }
        }
        let single = params("[parallel]\ndata = 2\nzero = 3\n[train]\nbatch = 4", 0);
        assert!(single.params.iter().all(|param| param.shards_weight));
    }

    #[test]
    fn what_tensor_ranks_split_has_an_owner_for_each_shard() {
        for rank in 0..2 {
            let RankParams { params, groups, .. } = params("[parallel]\ntensor = 2\nsequence = true", rank);
            let named = |name: &str| params.iter().find(|param| param.name == name).unwrap();
            let split = named("h.0.mlp.c_fc.weight");
            assert!(split.is_split && split.is_owner && !split.shard.is_full());
            assert_eq!(groups[split.group].peers, [rank]);
            // With the sequence split each sees other positions: their gradients of a norm are partial sums.
            let norm = named("h.0.ln_1.weight");
            assert_eq!((norm.is_split, norm.is_owner, norm.is_first_copy), (false, rank == 0, true));
            assert_eq!(groups[norm.group].peers, [0, 1]);
        }
    }
}
