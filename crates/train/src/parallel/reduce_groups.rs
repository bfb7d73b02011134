//! The groups of ranks that share parameters and statistics, as the plan has them ([`RankParams`]), with a
//! communicator each.

use std::collections::HashMap;

use espalier_comm::{Communicator, Reduce};
use espalier_nn::weights::{BufferId, WeightStore};
use espalier_plan::{Plan, RankParams};
use espalier_tensor::ops::elementwise::scale_into;
use espalier_tensor::ops::flat;
use espalier_tensor::{Category, DType, Tensor};

use super::Ranks;
use crate::Result;
use crate::state::ParamStore;

/// Those of a rank.
#[derive(Debug, Default)]
pub struct ReduceGroups {
    /// By [`GroupPlan`]; none where this rank is not in it, or the only one.
    groups: Vec<Option<Communicator>>,
    /// The group of each running statistic.
    statistics: Vec<usize>,
    /// Whether a statistic is measured on different samples by several ranks of one replica.
    copies: bool,
}

/// What all ranks know a group of parameters by: the stages that use them, and for each model-parallel rank
/// the first that it reduces with.
type GroupKey = (Vec<usize>, Vec<usize>);

impl ReduceGroups {
    /// Those of a plan; all ranks of the world must form them. A single rank has none.
    pub fn form(plan: &Plan, params: &RankParams, ranks: &Ranks) -> Result<ReduceGroups> {
        let copies = plan.schedule(1)?.placement.copies() > 1;
        let statistics = params.statistics.clone();
        if ranks.is_single() {
            return Ok(ReduceGroups { groups: Vec::new(), statistics, copies });
        }
        let (peers, local) =
            (plan.layout.local_models().len(), plan.layout.model_parallel_rank(ranks.coords()));
        let first_reduced = |id: usize, peer: usize| {
            (0..peer).find(|other| plan.layout.are_reduced(id, peer, *other)).unwrap_or(peer)
        };
        let apart: Vec<usize> = (0..peers).collect();
        let of_params = params.params.iter().map(|param| {
            let reduced = (0..peers).map(|peer| first_reduced(param.id, peer)).collect();
            (param.group, (params.groups[param.group].stages.clone(), reduced))
        });
        let of_statistics =
            statistics.iter().map(|group| (*group, (params.groups[*group].stages.clone(), apart.clone())));
        let mut groups = vec![None; params.groups.len()];
        // Every rank forms every group, in the same order, whether it is in it or not.
        let mut known: HashMap<GroupKey, Option<Communicator>> = HashMap::new();
        for (number, key) in of_params.chain(of_statistics) {
            if !known.contains_key(&key) {
                let is_member = params.members[number].is_some();
                let group = if params.groups[number].stages.len() == 1 && key.1 == apart {
                    // The replicas of one stage: their group is there already.
                    Some(ranks.data().clone())
                } else {
                    ranks.world().split(is_member.then_some(key.1[local]), ranks.rank())?
                };
                known.insert(key.clone(), group.filter(|group| is_member && group.size() > 1));
            }
            if groups[number].is_none() {
                groups[number] = known[&key].clone();
            }
        }
        Ok(ReduceGroups { groups, statistics, copies })
    }

    /// One group of all replicas.
    pub fn of_replicas(ranks: &Ranks) -> ReduceGroups {
        ReduceGroups { groups: vec![Some(ranks.data().clone())], ..ReduceGroups::default() }
    }

    /// The ranks of a group, where this one is in it and has others.
    pub fn of(&self, group: usize) -> Option<&Communicator> {
        self.groups.get(group)?.as_ref()
    }

    /// All that have others, with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Communicator)> {
        self.groups.iter().enumerate().filter_map(|(number, group)| Some((number, group.as_ref()?)))
    }

    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Whether one replica measures a statistic on several ranks.
    pub(crate) fn has_copies(&self) -> bool {
        self.copies
    }

    /// The statistics that several ranks measure.
    pub fn shared_statistics(&self) -> impl Iterator<Item = BufferId> {
        (0..self.statistics.len()).filter(|i| self.of(self.statistics[*i]).is_some()).map(BufferId)
    }

    /// Makes the running statistics of batch norms those of all ranks: their mean, in the same bits everywhere.
    pub(crate) fn average_statistics(&self, params: &mut ParamStore) -> Result<()> {
        self.all_reduce_statistics(params, |group| 1.0 / group.size() as f32)
    }

    /// All-reduces what stands in the running statistics, and multiplies it by a factor.
    pub(crate) fn all_reduce_statistics(
        &self,
        params: &mut ParamStore,
        factor: impl Fn(&Communicator) -> f32,
    ) -> Result<()> {
        for (number, group) in self.iter() {
            let of_group = |i: &usize| self.statistics[*i] == number;
            let ids: Vec<BufferId> = (0..self.statistics.len()).filter(of_group).map(BufferId).collect();
            if ids.is_empty() {
                continue;
            }
            // One message, put together where they are: on a GPU nobody waits for it.
            let lengths: Vec<usize> = ids.iter().map(|id| params.buffer(*id).len()).collect();
            let device = params.buffer(ids[0]).device();
            let mut all = Tensor::empty(&device, &[lengths.iter().sum()], DType::F32, Category::Workspace)?;
            let mut first = 0;
            for (id, length) in ids.iter().zip(&lengths) {
                flat::put(&mut all, first, params.buffer(*id), 0..*length)?;
                first += length;
            }
            let mut all = group.all_reduce(all, Reduce::Sum)?;
            scale_into(&mut all, factor(group))?;
            first = 0;
            for (id, length) in ids.into_iter().zip(lengths) {
                flat::put(params.buffer_mut(id), 0, &all, first..first + length)?;
                first += length;
            }
        }
        Ok(())
    }
}
