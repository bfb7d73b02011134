//! The smallest weights go, once.

use espalier_plan::config::Scope;

use super::{Decision, Draw, Network, Pruner};
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
    fn before_step(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        if network.step != self.at {
            return Ok(Decision::Wait);
        }
        let masks = network.keep_best(self.sparsity, self.scope, |id| network.magnitudes(id))?;
        Ok(Draw::of(masks))
    }
}
