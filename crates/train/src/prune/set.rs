//! SET (Mocanu et al. 2018): the smallest weights of each layer go, as many grow anywhere else.

use espalier_nn::weights::name_key;
use espalier_tensor::random;

use super::moving::{Moves, best_free};
use super::{Decision, Moment, Network, Pruner};
use crate::Result;

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"grow    ");

/// Sparse evolutionary training.
#[derive(Debug)]
pub struct Set(pub Moves);

impl Pruner for Set {
    fn looks(&self, at: Moment) -> bool {
        self.0.looks(at)
    }

    fn before_step(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        if network.step == 0 {
            return Ok(Decision::Prune(self.0.start(network)?));
        }
        let Some(share) = self.0.due(network.step, network.context.steps) else { return Ok(Decision::Wait) };
        // A place's number depends on the seed, the step, the parameter's name and the place alone.
        let seed = random::key(random::key(network.context.plan.seed, PURPOSE), network.step);
        Moves::draw(network, share, |id, count| {
            let key = random::key(seed, name_key(network.params.name(id)));
            best_free(network, id, network.random_keys(id, key)?, count)
        })
    }
}
