//! What a pruning method adds to the gradients of the loss.

use std::collections::BTreeMap;

use espalier_nn::weights::ParameterId;
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::ops::flat;
use espalier_tensor::{Category, Tensor};

use super::{Param, ParamStore};
use crate::Result;

/// A term beside the loss, by what it adds to the gradients of some parameters.
#[derive(Debug)]
pub enum Penalty<'a> {
    /// `strength * sign(w)`, a pull towards zero, clipped with the rest.
    L1 { ids: Vec<ParameterId>, strength: f32 },
    /// `strength * (w + offset)`, a pull towards minus the offset, which has the shape of the weight and is
    /// f32. Clipping leaves it alone.
    Proximal { offsets: &'a BTreeMap<ParameterId, Tensor>, strength: f32 },
}

impl Penalty<'_> {
    /// Adds what is clipped as gradients are.
    pub(crate) fn add_clipped(&self, params: &mut ParamStore) -> Result<()> {
        let Penalty::L1 { ids, strength } = self else { return Ok(()) };
        let here: Vec<ParameterId> = ids.iter().copied().filter(|id| params.holds(*id)).collect();
        here.into_iter().try_for_each(|id| params.param_mut(id).add_l1(*strength))
    }

    /// Adds what is not, to gradients that the step will multiply by `scale`.
    pub(crate) fn add_unclipped(&self, params: &mut ParamStore, scale: f64) -> Result<()> {
        let Penalty::Proximal { offsets, strength } = self else { return Ok(()) };
        let strength = (f64::from(*strength) / scale) as f32;
        offsets.iter().try_for_each(|(id, offset)| params.param_mut(*id).add_proximal(offset, strength))
    }
}

impl Param {
    /// Values of the weights whose gradient is here.
    fn stepped_values(&self) -> Result<Tensor> {
        if self.plan.zero.is_single() { self.values() } else { self.local_values() }
    }

    fn add_l1(&mut self, strength: f32) -> Result<()> {
        if self.gradient.is_none() {
            return Ok(());
        }
        let sign = |w: f32| if w == 0.0 { 0.0 } else { w.signum() };
        let values = self.stepped_values()?;
        let mut pulls = values.copy_to_host()?;
        pulls.iter_mut().for_each(|w| *w = strength * sign(*w));
        let pull = Tensor::from_slice(&values.device(), values.shape(), &pulls, Category::Workspace)?;
        self.add_to_gradient(&pull)
    }

    fn add_proximal(&mut self, offset: &Tensor, strength: f32) -> Result<()> {
        if self.gradient.is_none() {
            return Ok(());
        }
        let zero = self.plan.zero;
        let mut pull = match zero.is_single() {
            true => offset.duplicate(Category::Workspace)?,
            false => flat::take(offset, zero.split(offset.len()), Category::Workspace)?,
        };
        add_into(&mut pull, &self.stepped_values()?)?;
        scale_into(&mut pull, strength)?;
        self.add_to_gradient(&pull)
    }

    fn add_to_gradient(&mut self, pull: &Tensor) -> Result<()> {
        Ok(self.gradient.as_mut().map_or(Ok(()), |gradient| add_into(gradient, pull))?)
    }
}
