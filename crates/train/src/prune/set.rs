//! SET (Mocanu et al. 2018): the smallest weights of each layer go, as many grow anywhere else.

use espalier_nn::weights::name_key;
use espalier_tensor::random;

use super::drop_and_grow::{DropAndGrow, best_free};
use super::{Decision, Network, Pruner, StepClock};
use crate::Result;

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"grow    ");

/// Sparse evolutionary training.
#[derive(Debug)]
pub struct Set(pub DropAndGrow);

impl Pruner for Set {
    fn should_run(&self, at: StepClock) -> bool {
        self.0.should_run(at)
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        // A position's key depends on the seed, the step, the parameter's name and the position alone.
        let seed = random::key(random::key(network.context.plan.seed, PURPOSE), network.step);
        let growth = |id, count| {
            let key = random::key(seed, name_key(network.params.name(id)));
            best_free(network, id, network.random_keys(id, key)?, count)
        };
        self.0.decide(network, |fraction| DropAndGrow::update_masks(network, fraction, growth))
    }
}
