//! Who shares which parameter: the ranks whose gradients of it are added up.
//!
//! A parameter belongs to the parts of the model that use it: one, or several where it is tied. Every copy of such a part,
//! in every pipeline and every replica, makes a summand of its gradient. Of those with parts of the same layers the ones who hold the same piece
//! of it do, if the layout says that each has a summand; otherwise they have the same gradient already.

use std::collections::HashMap;
use std::ops::Range;

use espalier_comm::{Communicator, Reduce};
use espalier_nn::weights::{BufferId, ParameterId, Weights};
use espalier_plan::schedule::Placement;
use espalier_plan::{GroupRank, Plan};
use espalier_tensor::ops::elementwise::scale_into;
use espalier_tensor::ops::flat;
use espalier_tensor::{Category, DType, Tensor};

use super::Ranks;
use crate::Result;

/// What a group is known by: the parts of the model that use a parameter, and of those with parts of the same layers the first with whom each
/// sums.
type Key = (Vec<usize>, Vec<usize>);

/// The groups of all parameters that a rank holds.
#[derive(Debug, Default)]
pub struct Groups {
    groups: Vec<Communicator>,
    /// The group of each parameter and of each statistic, where it has others.
    parameters: Vec<Option<usize>>,
    buffers: Vec<Option<usize>>,
    /// Whether this rank speaks for its piece of a parameter where each must be counted once in a replica.
    owned: Vec<bool>,
    /// Whether the first of its peers that holds the same piece of a parameter is this rank, or in its group.
    first_copy: Vec<bool>,
    /// Whether a statistic is measured on different samples by several ranks of one replica.
    copies: bool,
}

impl Groups {
    /// Those of a plan; all ranks of the world must form them. One rank alone has none.
    pub fn form(plan: &Plan, placement: &Placement, ranks: &Ranks) -> Result<Groups> {
        let (parameters, buffers) = (plan.model.parameters().len(), plan.model.buffers().len());
        let mut groups = Groups {
            parameters: vec![None; parameters],
            buffers: vec![None; buffers],
            owned: vec![true; parameters],
            first_copy: vec![true; parameters],
            copies: placement.copies() > 1,
            groups: Vec::new(),
        };
        if ranks.is_alone() {
            return Ok(groups);
        }
        let used = |places: &dyn Fn(Range<usize>) -> Vec<usize>, count: usize| {
            let mut parts: Vec<Vec<usize>> = vec![Vec::new(); count];
            for (part, blocks) in plan.parts.iter().enumerate() {
                places(blocks.clone()).into_iter().for_each(|place| parts[place].push(part));
            }
            parts
        };
        let tensors = plan.model.block_tensors();
        let of_parameters = used(&|blocks| tensors.parameters(blocks), parameters);
        let of_buffers = used(&|blocks| tensors.buffers(blocks).collect(), buffers);
        let stage = ranks.stages().rank();
        let holders = |parts: &[usize]| {
            let mut holders: Vec<usize> = parts.iter().flat_map(|part| placement.holders(*part)).collect();
            holders.sort_unstable();
            holders.dedup();
            holders
        };
        let (locals, own) = (plan.layout.peers(), plan.layout.peer(ranks.place()));
        // For each of those with parts of the same layers the first whose gradients its own are added to.
        let summed: Vec<Vec<usize>> = (0..parameters)
            .map(|id| {
                let first = |peer: usize| (0..peer).find(|other| plan.layout.are_summed(id, peer, *other));
                (0..locals.len()).map(|peer| first(peer).unwrap_or(peer)).collect()
            })
            .collect();
        let apart: Vec<usize> = (0..locals.len()).collect();
        let of_parameters: Vec<Key> = of_parameters.into_iter().zip(summed).collect();
        // Statistics are measured on the same activations by all of them.
        let of_buffers: Vec<Key> = of_buffers.into_iter().map(|parts| (parts, apart.clone())).collect();
        // Every rank forms every group, in the same order, whether it is in it or not.
        let mut known: HashMap<Key, Option<usize>> = HashMap::new();
        for key in of_parameters.iter().chain(&of_buffers) {
            if known.contains_key(key) {
                continue;
            }
            let (holders, classes) = (holders(&key.0), &key.1);
            let is_holder = holders.contains(&stage);
            let group = match holders[..] {
                // The replicas of one stage: their group is there already.
                [_] if *classes == apart => Some(ranks.data().clone()),
                _ => ranks.world().split(is_holder.then_some(classes[own]), ranks.rank())?,
            };
            let place = group.filter(|group| is_holder && group.size() > 1).map(|group| {
                groups.groups.push(group);
                groups.groups.len() - 1
            });
            known.insert(key.clone(), place);
        }
        for (place, key) in of_parameters.iter().enumerate() {
            let pieces = |peer: usize| &locals[peer].shards[place];
            let first = (0..own).find(|peer| pieces(*peer) == pieces(own)).unwrap_or(own);
            groups.parameters[place] = known[key];
            groups.owned[place] = holders(&key.0)[0] == stage && first == own;
            groups.first_copy[place] = key.1[own] == key.1[first];
        }
        for (place, key) in of_buffers.iter().enumerate() {
            groups.buffers[place] = known[key];
        }
        Ok(groups)
    }

    /// So many parameters that every replica holds.
    pub fn of_replicas(ranks: &Ranks, parameters: usize) -> Groups {
        Groups {
            groups: vec![ranks.data().clone()],
            parameters: vec![Some(0); parameters],
            owned: vec![true; parameters],
            first_copy: vec![true; parameters],
            ..Groups::default()
        }
    }

    /// The number of a parameter's group, where it has one.
    pub fn number(&self, id: ParameterId) -> Option<usize> {
        self.parameters.get(id.0).copied().flatten()
    }

    /// The group of a [number](Groups::number).
    pub fn group(&self, number: usize) -> &Communicator {
        &self.groups[number]
    }

    /// The ranks that share a parameter with this one, where there are any.
    pub fn of(&self, id: ParameterId) -> Option<&Communicator> {
        self.number(id).map(|number| self.group(number))
    }

    /// Which part of a parameter's state is this rank's, where those who share it share that out too.
    pub fn member(&self, id: ParameterId) -> GroupRank {
        self.of(id).map_or(GroupRank::SINGLE, |group| GroupRank { ranks: group.size(), rank: group.rank() })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Whether what its group holds of a parameter is counted, where other ranks hold the same piece with the same gradient.
    pub fn is_first_copy(&self, id: ParameterId) -> bool {
        self.first_copy.get(id.0).copied().unwrap_or(true)
    }

    /// Whether this rank speaks for its piece of a parameter where each must be counted once in a replica.
    pub fn is_owner(&self, id: ParameterId) -> bool {
        self.owned.get(id.0).copied().unwrap_or(true)
    }

    /// Whether one replica measures a statistic on several ranks.
    pub fn has_copies(&self) -> bool {
        self.copies
    }

    /// The statistics that several ranks measure.
    pub fn shared_statistics(&self) -> impl Iterator<Item = BufferId> {
        (0..self.buffers.len()).filter(|i| self.buffers[*i].is_some()).map(BufferId)
    }

    /// Makes the running statistics of batch norms those of all ranks: their mean, in the same bits everywhere.
    pub fn average_statistics(&self, weights: &mut Weights) -> Result<()> {
        self.sum_statistics(weights, |group| 1.0 / group.size() as f32)
    }

    /// Adds up what stands in the place of running statistics, and multiplies it by a factor.
    pub fn sum_statistics(&self, weights: &mut Weights, factor: impl Fn(&Communicator) -> f32) -> Result<()> {
        for (number, group) in self.groups.iter().enumerate() {
            let ids: Vec<BufferId> =
                (0..self.buffers.len()).filter(|i| self.buffers[*i] == Some(number)).map(BufferId).collect();
            if ids.is_empty() {
                continue;
            }
            // One message, put together where they are: on a card nobody waits for it.
            let lengths: Vec<usize> = ids.iter().map(|id| weights.buffer(*id).len()).collect();
            let device = weights.buffer(ids[0]).device();
            let mut all = Tensor::empty(&device, &[lengths.iter().sum()], DType::F32, Category::Workspace)?;
            let mut first = 0;
            for (id, length) in ids.iter().zip(&lengths) {
                flat::put(&mut all, first, weights.buffer(*id), 0..*length)?;
                first += length;
            }
            let mut all = group.all_reduce(all, Reduce::Sum)?;
            scale_into(&mut all, factor(group))?;
            first = 0;
            for (id, length) in ids.into_iter().zip(lengths) {
                flat::put(weights.buffer_mut(id), 0, &all, first..first + length)?;
                first += length;
            }
        }
        Ok(())
    }
}
