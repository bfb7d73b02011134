//! Any weights, all alike: the baseline that every method must beat.
//!
//! A position's key depends on the seed, the parameter's name and the position alone.

use espalier_nn::weights::{ParameterId, name_key};
use espalier_plan::pruning::Scope;
use espalier_tensor::{Tensor, random};

use super::{Decision, Network, NewMasks, Pruner, StepClock};
use crate::Result;

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"prune   ");

/// Pruning by random numbers, one for each position of the full tensor.
#[derive(Debug)]
pub struct Random {
    /// The fraction of weights to prune.
    pub sparsity: f64,
    /// Whether weights of all layers compete, or those of each layer.
    pub scope: Scope,
    /// After so many steps.
    pub at: u64,
}

impl Pruner for Random {
    fn should_run(&self, at: StepClock) -> bool {
        at.step == self.at
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let masks = network.keep_best(self.sparsity, self.scope, |id| keys(network, id))?;
        Ok(NewMasks::of(masks))
    }
}

/// A key for each position of a parameter.
pub fn keys(network: &Network<'_>, id: ParameterId) -> Result<Tensor> {
    let seed = random::key(network.context.plan.seed, PURPOSE);
    let key = random::key(seed, name_key(network.params.name(id)));
    network.random_keys(id, key)
}
