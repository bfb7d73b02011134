//! A parameter as one value: what the plan says of it, its mask, weight, gradient and optimizer state.
//!
//! Whoever reads or writes a weight at rest asks for what it means: all of it as a dense tensor, or the values that are kept.

use espalier_nn::weights::ParameterId;
use espalier_plan::ParamPlan;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::compress::{compress, expand_into};
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::flat;
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Mask, Tensor};

use crate::Result;

/// A parameter, and what this rank has of it.
#[derive(Debug)]
pub struct Param {
    /// What follows from the plan: which shard, with whom, by which rules.
    pub plan: ParamPlan,
    /// Which weights are kept; none while all are.
    pub(super) mask: Option<Mask>,
    pub(super) weight: Stored,
    /// Where it is multiplied without its zeros: where the others are.
    pub(super) sparse: Option<SparseWeight>,
    /// The exact weight where [`Param::weight`] is rounded: in f32, or as the 16 bits that were lost.
    pub(crate) master: Option<Tensor>,
    /// Of the optimizer; none before the first step.
    pub(crate) moments: Vec<Tensor>,
    /// Summed over micro-batches and ranks, from when it is complete until the step is taken.
    pub gradient: Option<Tensor>,
    compresses: bool,
}

/// A weight at rest.
#[derive(Debug)]
pub(super) enum Stored {
    /// Another stage's.
    Elsewhere,
    /// As kernels read it, zero where it is pruned.
    Dense(Tensor),
}

impl Param {
    pub(super) fn new(plan: ParamPlan, weight: Stored, compresses: bool) -> Param {
        let (mask, sparse, master, gradient) = (None, None, None, None);
        Param { plan, mask, weight, sparse, master, moments: Vec::new(), gradient, compresses }
    }

    /// Which parameter it is.
    pub fn id(&self) -> ParameterId {
        ParameterId(self.plan.id)
    }

    /// Whether a stage of this rank has it.
    pub fn is_here(&self) -> bool {
        !matches!(self.weight, Stored::Elsewhere)
    }

    /// Weights in this rank's shard, kept or not.
    pub fn len(&self) -> usize {
        self.plan.shard.len()
    }

    /// Whether the shard has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Weights of the shard that are kept.
    pub fn kept(&self) -> usize {
        self.mask.as_ref().map_or(self.len(), Mask::kept)
    }

    /// Which weights are kept; none while all are.
    pub fn mask(&self) -> Option<&Mask> {
        self.mask.as_ref()
    }

    /// The mask by which gradient and state are compressed.
    pub fn compressing_mask(&self) -> Option<&Mask> {
        self.mask.as_ref().filter(|_| self.compresses)
    }

    /// The shape of its gradient and state, were all of them here: that of the weight, or a vector of kept values.
    pub fn state_shape(&self) -> Vec<usize> {
        match self.compressing_mask() {
            Some(mask) => vec![mask.kept()],
            None => self.plan.shard.shape(),
        }
    }

    /// Numbers of its gradient and of each of its moments, likewise.
    pub fn state_len(&self) -> usize {
        self.compressing_mask().map_or(self.len(), Mask::kept)
    }

    /// The weight, dense.
    pub fn weight(&self) -> &Tensor {
        match &self.weight {
            Stored::Dense(weight) => weight,
            Stored::Elsewhere => panic!("{} is on another stage", self.plan.name),
        }
    }

    /// The same, to be changed; what is pruned must stay zero.
    pub fn weight_mut(&mut self) -> &mut Tensor {
        match &mut self.weight {
            Stored::Dense(weight) => weight,
            Stored::Elsewhere => panic!("{} is on another stage", self.plan.name),
        }
    }

    /// A copy of the weight as f32.
    pub fn widened(&self, category: Category) -> Result<Tensor> {
        Ok(cast(self.weight(), DType::F32, category)?)
    }

    /// What of the weight its state is about, in order: kept values, or all of it where state is not compressed.
    pub fn values(&self) -> Result<Tensor> {
        Ok(match self.compressing_mask() {
            Some(mask) => compress(self.weight(), mask, Category::Workspace)?,
            None => self.weight().clone(),
        })
    }

    /// Gives the weight new values of what its state is about.
    pub fn set_values(&mut self, values: &Tensor) -> Result<()> {
        let Stored::Dense(weight) = &mut self.weight else { return Ok(()) };
        match self.mask.as_ref().filter(|_| self.compresses) {
            Some(mask) => expand_into(values, mask, weight)?,
            None => flat::put(weight, 0, values, 0..values.len())?,
        }
        Ok(())
    }

    /// This rank's part of the values, where ranks split its state.
    pub(crate) fn own_values(&self) -> Result<Tensor> {
        let values = self.values()?;
        Ok(flat::take(&values, self.plan.zero.split(values.len()), Category::Workspace)?)
    }

    /// Puts it under a mask, whose only owner this is, and has it multiplied by a pattern of that mask where `sparse` makes one.
    /// Weight and state must be those of the mask already.
    pub fn set_mask(
        &mut self,
        mask: Mask,
        sparse: impl FnOnce(&Mask) -> Result<Option<SparseWeight>>,
    ) -> Result<()> {
        // The old mask and its pattern go before the new ones are booked.
        (self.mask, self.sparse) = (None, None);
        let mask = self.mask.insert(mask);
        mask.book();
        self.sparse = sparse(mask)?;
        Ok(())
    }

    /// Bytes of mask and pattern.
    pub fn mask_bytes(&self) -> usize {
        self.mask.as_ref().map_or(0, Mask::bytes) + self.sparse.as_ref().map_or(0, SparseWeight::bytes)
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
    pub(crate) fn step_parts(&mut self) -> Option<StepParts<'_>> {
        let Stored::Dense(weight) = &mut self.weight else { return None };
        Some(StepParts {
            weight,
            master: self.master.as_mut(),
            moments: &mut self.moments,
            gradient: self.gradient.as_ref()?,
            mask: self.mask.as_ref(),
            plan: &self.plan,
        })
    }

    /// What counts of its gradient: kept elements, in the order in which compressed state has them.
    pub(super) fn kept_gradient(&self) -> Result<Option<Tensor>> {
        let Some(gradient) = &self.gradient else { return Ok(None) };
        Ok(Some(match &self.mask {
            Some(mask) if gradient.len() == mask.len() && !self.compresses => {
                compress(gradient, mask, Category::Workspace)?
            }
            _ => gradient.clone(),
        }))
    }

    /// Adds `strength * sign(w)` to its gradient: an L1 penalty pulls its weights towards zero.
    pub(crate) fn add_l1(&mut self, strength: f32) -> Result<()> {
        if self.gradient.is_none() {
            return Ok(());
        }
        let sign = |w: f32| if w == 0.0 { 0.0 } else { w.signum() };
        let mut pulls = self.weight().copy_to_host()?;
        pulls.iter_mut().for_each(|w| *w = strength * sign(*w));
        let (device, shape) = (self.weight().device(), self.weight().shape());
        let pull = Tensor::from_slice(&device, shape, &pulls, Category::Workspace)?;
        let pull = match self.compressing_mask() {
            Some(mask) => compress(&pull, mask, Category::Workspace)?,
            None => pull,
        };
        let zero = self.plan.zero;
        let Some(gradient) = &mut self.gradient else { return Ok(()) };
        let pull = match zero.is_single() {
            true => pull,
            false => flat::take(&pull, zero.split(pull.len()), Category::Workspace)?,
        };
        Ok(add_into(gradient, &pull)?)
    }
}

/// What a step of one parameter reads and writes.
pub(crate) struct StepParts<'a> {
    pub weight: &'a mut Tensor,
    pub master: Option<&'a mut Tensor>,
    pub moments: &'a mut Vec<Tensor>,
    pub gradient: &'a Tensor,
    pub mask: Option<&'a Mask>,
    pub plan: &'a ParamPlan,
}
