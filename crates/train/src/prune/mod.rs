//! Pruning methods, one file each: scores in, masks out.
//!
//! Before every step the run asks its [`Pruner`] whether it is time. A method reads the [`Network`] (and may
//! change its weights, which only rewinding does) and chooses new masks; what these do to weights and state is
//! the trainer's. Scores become whole numbers, of which the best are found exactly, so the same scores give
//! the same masks everywhere.

pub mod drop_and_grow;
pub mod early_bird;
pub mod elsa;
pub mod gradient;
pub mod gradual;
pub mod grasp;
pub mod hessian;
pub mod keep;
pub mod lottery;
pub mod magnitude;
mod passes;
pub mod random;
mod report;
pub mod rigl;
pub mod select;
pub mod set;
pub mod snip;
mod ties;
pub mod two_of_four;
pub mod wanda;

use std::collections::BTreeMap;
use std::fmt::Debug;

use espalier_nn::weights::{ParameterId, index_runs};
use espalier_plan::Plan;
use espalier_plan::Shard;
use espalier_plan::pruning::{PruneMethod, Scope};
use espalier_tensor::mask::{copy_bits, ones};
use espalier_tensor::ops::compress::apply;
use espalier_tensor::ops::select::{ScoreOrder, keys, random_keys};
use espalier_tensor::{Device, Tensor};

use crate::Result;
use crate::context::TrainContext;
use crate::prune::gradient::ScoringSamples;
use crate::state::{ParamStore, Penalty};
use crate::step::NoUpdatePass;
pub use report::{LayerDensity, Observation, PruneReport};

/// The bits of a mask, one a weight.
pub type MaskBits = Vec<u32>;

/// A pruning method in the course of a run.
pub trait Pruner: Debug + Send {
    /// Whether it runs at a moment. Ranks that go apart for some steps come together for it.
    fn should_run(&self, at: StepClock) -> bool;

    /// What it does where it runs, `network.step` steps having been taken.
    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision>;

    /// What it does before every step, whether it runs or not.
    fn prepare(&mut self, _network: &Network<'_>) -> Result<()> {
        Ok(())
    }

    /// Asked once before each step.
    fn before_step(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        self.prepare(network)?;
        if self.should_run(network.step_clock()) { self.run(network) } else { Ok(Decision::Wait) }
    }

    /// Where step `step` of `steps` stands in the schedule of the learning rate, and how long that is.
    fn position(&self, step: u64, steps: u64) -> (u64, u64) {
        (step, steps)
    }

    /// What is added to gradients in the next step.
    fn penalty(&self) -> Option<Penalty<'_>> {
        None
    }

    /// What it must remember to go on from a checkpoint, by name.
    fn save(&self) -> Result<BTreeMap<String, Vec<u32>>> {
        Ok(BTreeMap::new())
    }

    /// What it saves under a name; nothing where the name is another method's.
    fn state_kind<'a>(&self, _name: &'a str) -> Option<PrunerState<'a>> {
        None
    }

    /// Goes on from what was saved.
    fn load(&mut self, _saved: BTreeMap<String, Vec<u32>>) {}
}

/// What a method remembers under a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrunerState<'a> {
    /// Numbers that are the same on every rank.
    Replicated,
    /// A bit for each weight that this rank holds of a parameter.
    MaskOf(&'a str),
    /// The bytes of what it holds of a parameter or statistic.
    ValuesOf(&'a str),
    /// A number of f32 for each weight that this rank holds of a parameter.
    NumbersOf(&'a str),
}

/// A time in a run.
#[derive(Debug, Clone, Copy)]
pub struct StepClock {
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Steps of one pass over the training data.
    pub epoch: u64,
}

/// What a method does before a step.
#[derive(Debug)]
pub enum Decision {
    /// It does nothing before this step.
    Wait,
    /// It compared masks, and prunes nothing yet.
    Observe(Observation),
    /// It has new masks.
    Prune(NewMasks),
}

/// Masks that a method has chosen, and what it says of them.
#[derive(Debug, Default)]
pub struct NewMasks {
    /// Bits for each parameter that has a mask from now on.
    pub masks: Vec<(ParameterId, MaskBits)>,
    /// Whether optimizer state starts afresh.
    pub reset_state: bool,
    /// What a person should know about it.
    pub note: String,
    /// As in an [`Observation`].
    pub distances: Vec<f64>,
}

impl NewMasks {
    /// Masks and no more.
    pub fn of(masks: Vec<(ParameterId, MaskBits)>) -> Decision {
        Decision::Prune(NewMasks { masks, ..NewMasks::default() })
    }
}

/// A model as a method sees it.
#[derive(Debug)]
pub struct Network<'a> {
    /// The rank that asks: its plan, its coordinates and groups, its stage of the model, its data and its
    /// device.
    pub context: &'a TrainContext,
    pub step: u64,
    /// Steps of one pass over the training data.
    pub epoch: u64,
    /// What may be pruned.
    pub candidates: &'a [ParameterId],
    /// The parameters of this rank's stages, as they are now.
    pub params: &'a mut ParamStore,
    /// In how many passes a method that needs gradients of all candidates scores them ([`Plan::scoring`]).
    pub passes: usize,
}

impl Network<'_> {
    /// The time at which the method is asked.
    pub(crate) fn step_clock(&self) -> StepClock {
        StepClock { step: self.step, steps: self.context.steps, epoch: self.epoch }
    }

    /// Samples as weights are scored by them: batch norms measure the groups that one rank would have, on
    /// every layout.
    pub fn scored<'a>(&'a self, samples: &'a [(u64, usize)]) -> ScoringSamples<'a> {
        let scored_batch = self.context.plan.scored_batch();
        ScoringSamples { scored_batch, ..ScoringSamples::new(samples, scored_batch.samples, self.context) }
    }

    /// For passes over samples with the weights as they are now.
    pub fn no_update_pass(&self) -> NoUpdatePass<'_> {
        NoUpdatePass::of(self.context, self.params)
    }

    /// Elements of a candidate that are here.
    pub fn len(&self, id: ParameterId) -> usize {
        self.params.param(id).len()
    }

    /// Elements of all of it.
    pub(crate) fn full_len(&self, id: ParameterId) -> usize {
        self.context.param(id).shard.full_shape().iter().product()
    }

    /// Whether what is here of a parameter is counted here: of those that hold it one does.
    pub fn is_owner(&self, id: ParameterId) -> bool {
        self.context.is_owner(id)
    }

    /// A count over all stages, each weight counted on one rank.
    pub(crate) fn count_over(
        &self,
        ids: &[ParameterId],
        count: impl Fn(ParameterId) -> usize,
    ) -> Result<usize> {
        self.all_reduce_sum(ids.iter().filter(|id| self.is_owner(**id)).map(|id| count(*id)).sum())
    }

    /// All-reduce (sum) over all stages.
    pub fn all_reduce_sum(&self, local: usize) -> Result<usize> {
        Ok(self.context.ranks.all_reduce_over_replica(vec![local as u64])?[0] as usize)
    }

    /// Elements of all candidates.
    pub fn total(&self) -> Result<usize> {
        self.count_over(self.candidates, |id| self.len(id))
    }

    /// How many weights stay of so many.
    pub fn kept_of(elements: usize, sparsity: f64) -> usize {
        ((1.0 - sparsity) * elements as f64).round() as usize
    }

    /// The masks that keep the best candidates at a sparsity: `keys` gives those of a parameter, in which
    /// larger is better.
    pub(crate) fn keep_best(
        &self,
        sparsity: f64,
        scope: Scope,
        mut keys: impl FnMut(ParameterId) -> Result<Tensor>,
    ) -> Result<Vec<(ParameterId, MaskBits)>> {
        let ids = self.candidates;
        match scope {
            Scope::Global => self.keep(ids, Self::kept_of(self.total()?, sparsity), keys),
            Scope::Layer => {
                let mut layer = |id| -> Result<(ParameterId, MaskBits)> {
                    let count = Self::kept_of(self.full_len(id), sparsity).min(self.kept_count(id)?);
                    Ok((id, self.best(id, &self.exclude_pruned(id, keys(id)?)?, count)?))
                };
                ids.iter().map(|id| layer(*id)).collect()
            }
            Scope::Row => {
                let parameters = self.context.plan.model.parameters();
                let mut rows = |id: ParameterId| -> Result<(ParameterId, MaskBits)> {
                    let keep = Self::kept_of(parameters[id.0].output_rows().1 as usize, sparsity);
                    let dim = parameters[id.0].output_dim;
                    let best = |keys: &[u32], shape: &[usize]| match shape {
                        [len] => select::best_of_rows(keys, &[1, *len], 0, keep),
                        _ => select::best_of_rows(keys, shape, dim, keep),
                    };
                    Ok((id, self.mask_on_host(id, &self.exclude_pruned(id, keys(id)?)?, best)?))
                };
                ids.iter().map(|id| rows(*id)).collect()
            }
        }
    }

    /// A mask that is chosen from all keys of a parameter and its shape. Where it is split, a group of weights
    /// may be on two ranks: each reads all of the tensor and keeps its own bits.
    pub(crate) fn mask_on_host(
        &self,
        id: ParameterId,
        keys: &Tensor,
        choose: impl FnOnce(&[u32], &[usize]) -> MaskBits,
    ) -> Result<MaskBits> {
        let full_shape = self.context.param(id).shard.full_shape();
        if !self.context.param(id).is_split {
            return Ok(choose(&keys.read_u32()?, full_shape));
        }
        let keys = self.context.model_parallel.join(id, keys)?;
        let keys: Vec<u32> = keys.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        Ok(self.local_bits(id, choose(&keys, full_shape)))
    }

    /// The masks that keep the `count` best of some parameters, over all stages. What is gone already stays
    /// gone: where fewer are left than `count`, these stay.
    pub fn keep(
        &self,
        ids: &[ParameterId],
        count: usize,
        mut keys: impl FnMut(ParameterId) -> Result<Tensor>,
    ) -> Result<Vec<(ParameterId, MaskBits)>> {
        self.keep_visited(ids, count, select::one_by_one(ids.len(), |i| keys(ids[i])))
    }

    /// The same where `visit_all` shows the keys of each parameter by its index among `ids`, each time that
    /// it is called.
    pub(crate) fn keep_visited(
        &self,
        ids: &[ParameterId],
        count: usize,
        mut visit_all: impl FnMut(&mut select::KeyVisitor<'_>) -> Result<()>,
    ) -> Result<Vec<(ParameterId, MaskBits)>> {
        let count = count.min(self.count_over(ids, |id| self.local_kept_count(id))?);
        let visit_all = |visit: &mut select::KeyVisitor<'_>| {
            visit_all(&mut |i, keys| visit(i, self.exclude_pruned(ids[i], keys)?))
        };
        let distributed = select::DistributedTensors {
            positions: ids.iter().map(|id| id.0).collect(),
            owned: ids.iter().map(|id| self.is_owner(*id)).collect(),
            all: self.params.len(),
            shard: &|index| {
                let id = ParameterId(index);
                self.context.param(id).is_split.then(|| &self.context.param(id).shard)
            },
            all_reduce: &|counts| self.context.ranks.all_reduce_over_replica(counts),
        };
        let bits = select::best_of_distributed(&distributed, count, visit_all)?;
        Ok(ids.iter().copied().zip(bits).collect())
    }

    /// The mask that keeps the `count` best of a parameter, over all of it. Where it is split all that hold a
    /// shard must ask.
    pub fn best(&self, id: ParameterId, keys: &Tensor, count: usize) -> Result<MaskBits> {
        if !self.context.param(id).is_split {
            return select::best(keys, count);
        }
        let local = (&self.context.param(id).shard, self.context.model_parallel.is_owner(id));
        select::best_of_shards(keys, count, local, &|counts| {
            self.context.model_parallel.all_reduce_sum(counts)
        })
    }

    /// What is here of a mask of all of a parameter.
    pub(crate) fn local_bits(&self, id: ParameterId, full: MaskBits) -> MaskBits {
        if self.context.param(id).is_split {
            bits_of_shard(&full, &self.context.param(id).shard)
        } else {
            full
        }
    }

    /// Weights of all of a parameter that are not gone. Where it is split all that hold a shard must ask.
    pub(crate) fn kept_count(&self, id: ParameterId) -> Result<usize> {
        self.context.model_parallel.count(id, self.local_kept_count(id))
    }

    fn local_kept_count(&self, id: ParameterId) -> usize {
        self.params.param(id).kept()
    }

    /// A number for each position of a parameter, which depends on the position in the full tensor and on the
    /// stream alone.
    pub fn random_keys(&self, id: ParameterId, stream: u64) -> Result<Tensor> {
        Ok(random_keys(&self.context.device, &index_runs(&self.context.param(id).shard), stream)?)
    }

    /// The magnitudes of a parameter's weights as keys.
    pub fn magnitudes(&self, id: ParameterId) -> Result<Tensor> {
        Ok(keys(&self.params.param(id).dense()?, ScoreOrder::Magnitude)?)
    }

    /// Keys in which weights that are pruned already come last: any other is above them.
    pub(crate) fn exclude_pruned(&self, id: ParameterId, mut keys: Tensor) -> Result<Tensor> {
        if let Some(mask) = self.params.mask(id) {
            apply(&mut keys, mask)?;
        }
        Ok(keys)
    }
}

/// The method of a plan, for a run of so many steps.
pub fn pruner(plan: &Plan, steps: u64) -> Result<Option<Box<dyn Pruner>>> {
    let Some(prune) = &plan.pruning else { return Ok(None) };
    // Where the run file counts epochs, only the data says how many steps there are.
    prune.method.check_length(steps as usize)?;
    let sparsity = prune.sparsity;
    Ok(Some(match prune.method {
        PruneMethod::Random { scope, at } => Box::new(random::Random { sparsity, scope, at: at as u64 }),
        PruneMethod::Magnitude { scope, at } => {
            Box::new(magnitude::Magnitude { sparsity, scope, at: at as u64 })
        }
        PruneMethod::Gradual { scope, initial, span, every } => {
            Box::new(gradual::Gradual { initial, sparsity, scope, span, every: every as u64 })
        }
        PruneMethod::Elsa { span, every, penalty } => {
            Box::new(elsa::Elsa::new(sparsity, span, every as u64, penalty as f32))
        }
        PruneMethod::Wanda { scope, samples, at } => {
            Box::new(wanda::Wanda { sparsity, scope, samples, at: at as u64 })
        }
        PruneMethod::Snip { samples, .. } => Box::new(snip::Snip { sparsity, samples }),
        PruneMethod::Grasp { samples, temperature, score, .. } => {
            Box::new(grasp::Grasp { sparsity, samples, temperature: temperature as f32, score })
        }
        PruneMethod::EarlyBird { .. } => Box::new(early_bird::EarlyBird::new(plan, prune)),
        PruneMethod::Lottery { .. } => Box::new(lottery::Lottery::new(plan, prune, steps)?),
        PruneMethod::Set(moving) => Box::new(set::Set(drop_and_grow::DropAndGrow::new(moving))),
        PruneMethod::Rigl(moving) => Box::new(rigl::Rigl(drop_and_grow::DropAndGrow::new(moving))),
        PruneMethod::Keep => Box::new(keep::Keep),
        PruneMethod::TwoOfFour { at } => Box::new(two_of_four::TwoOfFour { at: at as u64 }),
    }))
}

/// Bytes that the tensors of each of so many ranks may take of the device that they share, where that is known.
pub fn memory_per_rank(device: &Device, ranks: usize) -> Option<u64> {
    Some((device.memory()? / ranks) as u64)
}

/// Whether a mask keeps the weight of an index.
pub fn is_kept(bits: &[u32], index: usize) -> bool {
    bits[index / 32] >> (index % 32) & 1 == 1
}

/// In how many positions two masks of one parameter differ.
pub fn differing(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones() as usize).sum()
}

/// How many weights a mask keeps.
pub fn count(bits: &[u32]) -> usize {
    bits.iter().map(|word| word.count_ones() as usize).sum()
}

/// The indices that a mask keeps.
pub fn kept_indices(bits: &[u32]) -> Vec<usize> {
    ones(bits).collect()
}

/// What a shard has of a mask of the full tensor.
pub(crate) fn bits_of_shard(bits: &[u32], shard: &Shard) -> MaskBits {
    let mut local = vec![0; shard.len().div_ceil(32)];
    shard.runs().for_each(|run| copy_bits(bits, run.in_full, &mut local, run.at, run.length));
    local
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_has_its_bits_of_the_full_mask() {
        let heads = Shard::full(&[2, 6]).narrow(1, &[1..2, 4..6]);
        // Columns 1, 4 and 5 of each row.
        let rows = [0b10_0110, 0b01_0001];
        assert_eq!(bits_of_shard(&[rows[1] << 6 | rows[0]], &heads), [0b010_101]);
    }
}
