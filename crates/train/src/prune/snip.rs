//! SNIP (Lee, Ajanthan & Torr 2019): before the first step, keep the weights whose removal changes the loss most.
//!
//! The score is `|w dL/dw|`, with L the mean loss over the chosen samples: gradients are summed before the
//! absolute value is taken. The paper divides by the sum of all scores, which changes no order. Dropout drops
//! and batch norm measures, as in the step that follows.

use espalier_data::DataSplit;
use espalier_nn::weights::ParameterId;
use espalier_tensor::ops::select::ScoreOrder;
use espalier_tensor::{Tensor, random};

use super::gradient::{ScoringSamples, gradient};
use super::{Decision, Network, NewMasks, Pruner, StepClock};
use crate::Result;

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"snip    ");

/// Pruning by sensitivity.
#[derive(Debug)]
pub struct Snip {
    /// The fraction of weights to prune.
    pub sparsity: f64,
    /// Training samples scored: the first that the run will meet; 0: all of them.
    pub samples: usize,
}

impl Pruner for Snip {
    fn should_run(&self, at: StepClock) -> bool {
        at.step == 0
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let gradients = |ids: &[ParameterId]| self.gradients_of(network, ids);
        Ok(NewMasks::of(network.keep_scored(self.sparsity, gradients, ScoreOrder::Magnitude)?))
    }
}

impl Snip {
    /// dL/dw of every candidate, in their order.
    pub fn gradients(&self, network: &Network<'_>) -> Result<Vec<Tensor>> {
        self.gradients_of(network, network.candidates)
    }

    fn gradients_of(&self, network: &Network<'_>, ids: &[ParameterId]) -> Result<Vec<Tensor>> {
        let all = network.context.dataset.len(DataSplit::Train);
        let count = if self.samples == 0 { all } else { self.samples.min(all) };
        let samples = network.context.order.indices(0, count);
        let random = random::key(network.context.plan.seed, PURPOSE);
        let scored = ScoringSamples { random, ..network.scored(&samples) };
        gradient(network.no_update_pass(), ids, scored)
    }
}
