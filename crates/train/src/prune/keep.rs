//! Nothing goes but what has gone: the mask of a pruned model is found in its weights.
//!
//! A checkpoint of ours says by masks what was pruned; a folder that another program wrote, or that was
//! exported, has zeros in their place, and training would bring them back. Before the first step every
//! candidate gets the mask of its weights that are not zero, so that gradients and state exist for these
//! alone from the first step on, and weights may rest compressed: whatever a method that prunes may ask for.

use espalier_nn::weights::ParameterId;
use espalier_plan::Error as PlanError;

use super::{Decision, MaskBits, Network, NewMasks, Pruner, StepClock};
use crate::Result;

/// How far the zeros that are found may be from those that the run was planned with: numbers near zero may
/// become zeros where they are rounded to the run's precision.
const TOLERANCE: f64 = 1e-3;

/// Masks that keep the weights that are not zero.
#[derive(Debug)]
pub struct Keep;

impl Pruner for Keep {
    fn should_run(&self, at: StepClock) -> bool {
        at.step == 0
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let mask =
            |id: &ParameterId| Ok((*id, nonzero_bits(&network.params.param(*id).dense()?.read_f32()?)));
        let masks = network.candidates.iter().map(mask).collect::<Result<_>>()?;
        Ok(NewMasks::of(masks))
    }
}

/// An error where there are no zeros to keep, or not those that the run file says.
pub(crate) fn check_zeros(zeros: u64, all: u64, sparsity: f64) -> Result<(), PlanError> {
    let conflict = |field: &str, problem: String| Err(PlanError::Conflict { field: field.into(), problem });
    let found = zeros as f64 / all.max(1) as f64;
    if zeros == 0 {
        let problem = "is \"keep\", and none of the prunable weights that the run starts from is zero: it is not pruned";
        return conflict("prune.method", problem.into());
    }
    if (found - sparsity).abs() > TOLERANCE {
        let problem = format!(
            "is {sparsity}, and {found:.4} of the prunable weights that the run starts from are zero: leave it out"
        );
        return conflict("prune.sparsity", problem);
    }
    Ok(())
}

/// A bit for each weight that is not zero.
pub(crate) fn nonzero_bits(weights: &[f32]) -> MaskBits {
    let word = |weights: &[f32]| {
        let bits = weights.iter().enumerate().map(|(bit, weight)| u32::from(*weight != 0.0) << bit);
        bits.fold(0, |word, bit| word | bit)
    };
    weights.chunks(32).map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_of_what_is_not_zero() {
        let mut weights = [1.0; 35];
        (weights[0], weights[33]) = (0.0, -0.0);
        assert_eq!(nonzero_bits(&weights), [!1, 0b101]);
    }

    #[test]
    fn zeros_that_are_not_there_are_named() {
        check_zeros(1, 3, 1.0 / 3.0).unwrap();
        let error = check_zeros(0, 3, 0.5).unwrap_err().to_string();
        assert_eq!(
            error,
            "`prune.method` is \"keep\", and none of the prunable weights that the run starts from is zero: it is not pruned"
        );
        let error = check_zeros(1, 3, 0.5).unwrap_err().to_string();
        assert_eq!(
            error,
            "`prune.sparsity` is 0.5, and 0.3333 of the prunable weights that the run starts from are zero: leave it out"
        );
    }
}
