//! A parameter as one value: what the plan says of it, its mask, weight, gradient and optimizer state.
//!
//! Whoever reads or writes a stored weight asks for what it means: all of it as a dense tensor, or the
//! values that are kept.

use std::ops::Range;

use espalier_nn::weights::ParameterId;
use espalier_plan::{ParamPlan, split};
use espalier_tensor::mask::ones;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::compress::{Compressed, apply, compress};
use espalier_tensor::ops::flat;
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Device, Mask, Tensor};

use super::stored_weight::{StoredForm, StoredWeight, WeightSharding};
use crate::Result;

/// A parameter, and what this rank has of it.
#[derive(Debug)]
pub struct Param {
    /// What follows from the plan: which shard, with whom, by which rules.
    pub plan: ParamPlan,
    /// Its weight, in the form that it has while no block uses it, and its mask.
    pub(super) stored: StoredWeight,
    /// The exact weight where [`Param::weight`] is rounded: in f32, or as the 16 bits that were lost.
    pub(crate) master: Option<Tensor>,
    /// Of the optimizer; none before the first step.
    pub(crate) moments: Vec<Tensor>,
    /// Summed over micro-batches and ranks, from when it is complete until the step is taken.
    pub gradient: Option<Tensor>,
    compresses: bool,
    /// Whether its weight is stored as kept values too, under a mask.
    compresses_weight: bool,
}

impl Param {
    pub(super) fn new(plan: ParamPlan, weight: StoredForm, compresses: bool) -> Param {
        let stored = StoredWeight::new(weight, plan.shard.shape());
        let (master, moments, gradient) = (None, Vec::new(), None);
        Param { plan, stored, master, moments, gradient, compresses, compresses_weight: false }
    }

    /// The same, of whose weight ranks have a shard each.
    pub(super) fn sharding_weight(self, sharding: Option<WeightSharding>) -> Result<Param> {
        debug_assert!(self.compresses || sharding.is_none(), "weights are sharded where state is");
        Ok(Param { stored: self.stored.sharded(sharding)?, ..self })
    }

    /// The same, whose weight is stored as kept values under a mask that compresses gradient and state.
    pub(super) fn compressing_weight(self, compresses_weight: bool) -> Param {
        debug_assert!(self.compresses || !compresses_weight, "weights are compressed where state is");
        Param { compresses_weight, ..self }
    }

    /// Which parameter it is.
    pub fn id(&self) -> ParameterId {
        ParameterId(self.plan.id)
    }

    /// Whether a stage of this rank has it.
    pub fn is_here(&self) -> bool {
        self.stored.is_here()
    }

    /// Weights in this rank's shard, kept or not.
    pub fn len(&self) -> usize {
        self.plan.shard.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Weights of the shard that are kept.
    pub fn kept(&self) -> usize {
        self.mask().map_or(self.len(), Mask::kept)
    }

    /// Which weights are kept; none while all are.
    pub fn mask(&self) -> Option<&Mask> {
        self.stored.mask.as_ref()
    }

    /// The mask by which gradient and state are compressed.
    pub fn compressing_mask(&self) -> Option<&Mask> {
        self.mask().filter(|_| self.compresses)
    }

    /// The shape of its gradient and state, were all of them here: that of the weight, or a vector of kept values.
    pub(crate) fn state_shape(&self) -> Vec<usize> {
        match self.compressing_mask() {
            Some(mask) => vec![mask.kept()],
            None => self.plan.shard.shape(),
        }
    }

    /// Numbers of its gradient and of each of its moments, likewise.
    pub fn state_len(&self) -> usize {
        self.compressing_mask().map_or(self.len(), Mask::kept)
    }

    /// The weight where it is stored dense.
    pub fn weight(&self) -> &Tensor {
        match &self.stored.form {
            StoredForm::Dense(weight) => weight,
            other => panic!("{} is not dense at rest but {}", self.plan.name, other.name()),
        }
    }

    /// The same, to be changed; what is pruned must stay zero.
    pub fn weight_mut(&mut self) -> &mut Tensor {
        match &mut self.stored.form {
            StoredForm::Dense(weight) => weight,
            other => panic!("{} is not dense at rest but {}", self.plan.name, other.name()),
        }
    }

    /// The weight, dense, however it is stored: one that is made for this is workspace as long as it lives.
    /// Where ranks have shards of it all of them must ask.
    pub fn dense(&self) -> espalier_nn::Result<Tensor> {
        self.stored.dense(Category::Workspace)
    }

    /// The same of one that is here in full.
    pub(crate) fn expanded(&self) -> Result<Tensor, espalier_tensor::Error> {
        self.stored.expanded(Category::Workspace)
    }

    /// This rank's shard of the values, where that is all that it has of the weight.
    pub fn weight_shard(&self) -> Option<&Tensor> {
        match &self.stored.form {
            StoredForm::Sharded(shard) => Some(shard),
            _ => None,
        }
    }

    /// Which elements of the dense weight this rank's shard of it speaks for, where ranks have shards: of a
    /// masked one from its first kept weight to that of the next rank.
    pub(crate) fn weight_range(&self) -> Result<Option<Range<usize>>> {
        let Some(WeightSharding { member, .. }) = &self.stored.sharding else { return Ok(None) };
        let Some(mask) = self.mask() else { return Ok(Some(member.split(self.len()))) };
        let (bits, kept) = (mask.read_words()?, mask.kept());
        let start = |rank: usize| match split(kept, member.ranks, rank).start {
            0 => 0,
            first if first == kept => self.len(),
            first => ones(&bits).nth(first).expect("one of the kept weights"),
        };
        let is_last = member.rank + 1 == member.ranks;
        let end = if is_last { self.len() } else { start(member.rank + 1) };
        Ok(Some(start(member.rank)..end))
    }

    /// Whether this rank has but a shard of the weight.
    pub fn is_weight_sharded(&self) -> bool {
        self.weight_shard().is_some()
    }

    /// The weight as it is stored, dense, its kept values or a shard; none where it is not initialised yet.
    pub fn at_rest(&self) -> Option<&Tensor> {
        self.stored.tensor()
    }

    /// What the weight is on.
    pub fn device(&self) -> Device {
        self.stored.device_and_dtype().0
    }

    /// The type of the weight.
    pub fn dtype(&self) -> DType {
        self.stored.device_and_dtype().1
    }

    /// Bytes of the weight as it is stored.
    pub fn weight_bytes(&self) -> usize {
        self.at_rest().map_or(0, Tensor::byte_len)
    }

    /// A copy of the weight as f32.
    pub fn widened(&self, category: Category) -> Result<Tensor> {
        Ok(cast(&self.dense()?, DType::F32, category)?)
    }

    /// What of the weight its state is about, in order: kept values, or all of it where state is not
    /// compressed. Where ranks have shards of it all of them must ask.
    pub fn values(&self) -> Result<Tensor> {
        if let Some(values) = self.stored.gathered()? {
            return Ok(values);
        }
        Ok(match (self.stored.compressed(), self.compressing_mask()) {
            (Some(Compressed { kept, .. }), _) => kept.clone(),
            (None, Some(mask)) => compress(&self.dense()?, mask, Category::Workspace)?,
            (None, None) => self.dense()?,
        })
    }

    /// The same to be changed, where it is stored as that.
    pub(crate) fn values_mut(&mut self) -> Option<&mut Tensor> {
        let is_dense = self.compressing_mask().is_none();
        match &mut self.stored.form {
            StoredForm::Compressed(kept) => Some(kept),
            StoredForm::Dense(weight) if is_dense => Some(weight),
            _ => None,
        }
    }

    /// Gives the weight new values of what its state is about.
    pub fn set_values(&mut self, values: &Tensor) -> Result<()> {
        if !self.is_here() {
            return Ok(());
        }
        if self.is_weight_sharded() {
            return Ok(self.stored.set_values(values)?);
        }
        match self.values_mut() {
            Some(at_rest) => flat::put(at_rest, 0, values, 0..values.len())?,
            None => self.stored.set_kept(values)?,
        }
        Ok(())
    }

    /// Gives the weight other values, all of them, from the host's bytes. What its mask does not keep is not
    /// to be kept.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if let StoredForm::Dense(weight) = &mut self.stored.form {
            return Ok(weight.copy_from_host(bytes)?);
        }
        let ((device, dtype), shape) = (self.stored.device_and_dtype(), &self.stored.shape);
        let mut dense = Tensor::empty(&device, shape, dtype, Category::Workspace)?;
        dense.copy_from_host(bytes)?;
        Ok(self.stored.write(dense)?)
    }

    /// Sets to zero what a mask that it is about to get does not keep, where it stays dense under it.
    pub(crate) fn zero_pruned(&mut self, mask: &Mask) -> Result<()> {
        match &mut self.stored.form {
            StoredForm::Dense(weight) if !self.compresses_weight => Ok(apply(weight, mask)?),
            _ => Ok(()),
        }
    }

    /// This rank's shard of the values, where ranks split its state.
    pub(crate) fn local_values(&self) -> Result<Tensor> {
        if let Some(shard) = self.weight_shard() {
            return Ok(shard.clone());
        }
        let values = self.values()?;
        Ok(flat::take(&values, self.plan.zero.split(values.len()), Category::Workspace)?)
    }

    /// Puts it under a mask, whose only owner this is, and has it multiplied by a pattern of that mask where
    /// `sparse` makes one. A weight that stays dense must be zero already where that keeps nothing, and state
    /// be that of the mask.
    pub fn set_mask(
        &mut self,
        mask: Mask,
        sparse: impl FnOnce(&Mask) -> Result<Option<SparseWeight>>,
    ) -> Result<()> {
        let mask = self.stored.set_mask(mask, self.compresses_weight)?;
        self.stored.sparse = sparse(mask)?;
        Ok(())
    }

    /// Bytes of mask and pattern.
    pub fn mask_bytes(&self) -> usize {
        self.mask().map_or(0, Mask::bytes) + self.stored.sparse.as_ref().map_or(0, SparseWeight::bytes)
    }

    /// The tensors of its optimizer state: the master, where there is one, and the moments.
    pub fn state(&self) -> impl Iterator<Item = &Tensor> {
        self.master.iter().chain(&self.moments)
    }

    /// The same, to be changed.
    pub(crate) fn state_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        self.master.iter_mut().chain(&mut self.moments)
    }

    /// Bytes of its optimizer state.
    pub fn state_bytes(&self) -> usize {
        self.state().map(Tensor::byte_len).sum()
    }

    /// What a step reads and writes, where there is a gradient.
    pub(crate) fn step_tensors(&mut self) -> Option<StepTensors<'_>> {
        let StoredWeight { form, mask, .. } = &mut self.stored;
        Some(StepTensors {
            weight: form.tensor_mut()?,
            master: self.master.as_mut(),
            moments: &mut self.moments,
            gradient: self.gradient.as_ref()?,
            mask: mask.as_ref(),
            plan: &self.plan,
        })
    }

    /// Where the weight, which must be here, and the tensors of its state are read to.
    pub(super) fn load_targets(&mut self) -> Result<ParamTargets<'_>> {
        self.stored.allocate()?;
        let StoredWeight { form, mask, .. } = &mut self.stored;
        let weight = match (form, mask) {
            (StoredForm::Dense(weight), _) => WeightTarget::Dense(weight),
            (StoredForm::Compressed(kept), Some(mask)) => WeightTarget::Compressed(kept, mask),
            (StoredForm::Sharded(shard), mask) => WeightTarget::Sharded(shard, mask.as_ref()),
            _ => panic!("{} is on another stage", self.plan.name),
        };
        Ok(ParamTargets { weight, state: self.master.iter_mut().chain(&mut self.moments).collect() })
    }

    /// What counts of its gradient: kept elements, in the order in which compressed state has them.
    pub(super) fn kept_gradient(&self) -> Result<Option<Tensor>> {
        let Some(gradient) = &self.gradient else { return Ok(None) };
        Ok(Some(match self.mask() {
            Some(mask) if gradient.len() == mask.len() && !self.compresses => {
                compress(gradient, mask, Category::Workspace)?
            }
            _ => gradient.clone(),
        }))
    }
}

/// Where what is about to be read of a parameter goes.
#[derive(Debug)]
pub(crate) struct ParamTargets<'a> {
    pub weight: WeightTarget<'a>,
    /// The tensors of its state, the master first.
    pub state: Vec<&'a mut Tensor>,
}

/// Where the values of a weight that are about to be read go.
#[derive(Debug)]
pub(crate) enum WeightTarget<'a> {
    /// All of them.
    Dense(&'a mut Tensor),
    /// Those that a mask keeps.
    Compressed(&'a mut Tensor, &'a Mask),
    /// This rank's shard of these, or of all where there is none.
    Sharded(&'a mut Tensor, Option<&'a Mask>),
}

/// What a step of one parameter reads and writes: the weight as it is stored.
pub(crate) struct StepTensors<'a> {
    pub weight: &'a mut Tensor,
    pub master: Option<&'a mut Tensor>,
    pub moments: &'a mut Vec<Tensor>,
    pub gradient: &'a Tensor,
    pub mask: Option<&'a Mask>,
    pub plan: &'a ParamPlan,
}
