//! The smallest weights go, once.

use espalier_plan::pruning::Scope;

use super::{Decision, Draw, Moment, Network, Pruner};
use crate::Result;

/// Magnitude pruning in one shot.
#[derive(Debug)]
pub struct Magnitude {
    /// The share that goes.
    pub sparsity: f64,
    /// Over what the threshold is.
    pub scope: Scope,
    /// After so many steps.
    pub at: u64,
}

impl Pruner for Magnitude {
    fn looks(&self, at: Moment) -> bool {
        at.step == self.at
    }

    fn before_step(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        if !self.looks(network.moment()) {
            return Ok(Decision::Wait);
        }
        let masks = network.keep_best(self.sparsity, self.scope, |id| network.magnitudes(id))?;
        Ok(Draw::of(masks))
    }
}
