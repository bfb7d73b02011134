//! The smallest weights go, once.

use espalier_plan::pruning::Scope;

use super::{Decision, Network, NewMasks, Pruner, StepClock};
use crate::Result;

/// Magnitude pruning in one shot.
#[derive(Debug)]
pub struct Magnitude {
    /// The fraction of weights to prune.
    pub sparsity: f64,
    /// Over what the threshold is.
    pub scope: Scope,
    /// After so many steps.
    pub at: u64,
}

impl Pruner for Magnitude {
    fn should_run(&self, at: StepClock) -> bool {
        at.step == self.at
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let masks = network.keep_best(self.sparsity, self.scope, |id| network.magnitudes(id))?;
        Ok(NewMasks::of(masks))
    }
}
