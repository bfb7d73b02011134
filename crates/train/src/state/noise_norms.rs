//! Squared norms of single micro-batches' gradients, for the gradient noise scale: measured before they are
//! accumulated.

use std::collections::HashSet;

use espalier_nn::weights::ParameterId;
use espalier_tensor::ops::compress::compress;
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::flat;
use espalier_tensor::ops::reduce::squared_norm;
use espalier_tensor::{Category, Tensor};

use super::{Param, ParamStore};
use crate::Result;

/// The sum of squared norms over the micro-batches of a step.
#[derive(Debug)]
pub(crate) struct NoiseNorms {
    /// What another rank counts.
    skipped: HashSet<ParameterId>,
    /// Tied parameters come once for each use, and what counts is the norm of the sum: so these wait until
    /// their micro-batch has ended.
    uses: Vec<(ParameterId, Tensor)>,
    squares: f64,
}

impl NoiseNorms {
    /// Over all parameters but those that another rank counts.
    pub fn new(skipped: HashSet<ParameterId>) -> NoiseNorms {
        NoiseNorms { skipped, uses: Vec::new(), squares: 0.0 }
    }

    /// Takes in a gradient, or what one use of a tied parameter adds to it; of a masked one what is kept.
    pub fn add(&mut self, id: ParameterId, param: &Param, gradient: &Tensor) -> Result<()> {
        if self.skipped.contains(&id) {
            return Ok(());
        }
        let tied = param.plan.is_tied;
        let kept = match param.mask().filter(|mask| gradient.len() == mask.len()) {
            Some(mask) => compress(gradient, mask, Category::Workspace)?,
            None if tied => flat::take(gradient, 0..gradient.len(), Category::Workspace)?,
            None => gradient.clone(),
        };
        if !tied {
            self.squares += squared_norm(&kept)?;
            return Ok(());
        }
        match self.uses.iter_mut().find(|(tied, _)| *tied == id) {
            Some((_, sum)) => add_into(sum, &kept)?,
            None => self.uses.push((id, kept)),
        }
        Ok(())
    }

    /// Says that what comes next is another micro-batch's.
    pub(crate) fn end_micro_batch(&mut self) -> Result<()> {
        for (_, sum) in self.uses.drain(..) {
            self.squares += squared_norm(&sum)?;
        }
        Ok(())
    }

    /// The sum over micro-batches of squared norms, and the squared norm of the sum, over the same parameters.
    pub fn finish(&mut self, params: &ParamStore) -> Result<(f64, f64)> {
        let of_sum = params.squared_gradient_norm(|plan| !self.skipped.contains(&ParameterId(plan.id)))?;
        Ok((std::mem::take(&mut self.squares), of_sum))
    }
}

#[cfg(test)]
mod tests {
    use espalier_tensor::{DType, Device};

    use super::*;
    use crate::state::Accumulator;

    /// A tied table comes twice for each micro-batch, from the head and from the embedding: what counts is
    /// the norm of their sum.
    #[test]
    fn the_norms_of_a_tied_table_are_those_of_the_sum_of_its_uses() {
        let device = Device::cpu(1).unwrap();
        let weight = || Tensor::zeros(&device, &[2], DType::F32, Category::Weights).unwrap();
        let mut params = ParamStore::of_tensors(vec![("tied", weight()), ("other", weight())], false);
        params.param_mut(ParameterId(0)).plan.is_tied = true;
        let (mut sums, mut norms) = (Accumulator::new(2, None), NoiseNorms::new(HashSet::new()));
        for micro_batch in [
            [(0, [1.0, 2.0]), (1, [0.5, 0.0]), (0, [3.0, -2.0])],
            [(0, [0.0, 1.0]), (0, [1.0, 1.0]), (1, [0.5, 2.0])],
        ] {
            for (id, values) in micro_batch.map(|(id, values)| (ParameterId(id), values)) {
                let gradient = Tensor::from_slice(&device, &[2], &values, Category::Workspace).unwrap();
                norms.add(id, params.param(id), &gradient).unwrap();
                sums.add(id, params.param(id), gradient).unwrap();
            }
            norms.end_micro_batch().unwrap();
        }
        sums.finish(&mut params);
        // (4, 0) and (0.5, 0), then (1, 2) and (0.5, 2): 16.25 + 9.25; their sums (5, 2) and (1, 2): 29 + 5.
        assert_eq!(norms.finish(&params).unwrap(), (25.5, 34.0));
    }
}
