//! The bytes of one rank by category, and what of them is held at once.

use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct MemoryPlan {
    /// Weights, and the running statistics of norms, at the peak: weights that rest compressed are dense
    /// before, where passes over them say which are kept.
    pub weights: u64,
    /// The same while it trains.
    #[serde(skip)]
    pub weights_at_rest: u64,
    /// Gradients of all parameters, as they are accumulated over micro-batches. What is all-reduced as well
    /// is rounded to the precision of the run when it is sent, so this is the most that is held before. Where
    /// gradients are reduce-scattered as they are made, the rank's shards of them, and tied ones in full.
    pub gradients: u64,
    /// Master weights and moments, and what ELSA pulls towards.
    pub optimizer: u64,
    /// Which weights are kept; nothing without pruning.
    pub mask: u64,
    /// What scoring by gradients holds before the first step, in one pass, or RigL before some steps; nothing
    /// for other methods of pruning.
    pub scoring: u64,
    /// What choosing the masks of weights that do not exist yet takes, one parameter at a time: its first
    /// values, and a key for each.
    #[serde(skip)]
    pub setup: u64,
    /// Whether the optimizer's state is there by then.
    #[serde(skip)]
    pub scores_beside_state: bool,
    /// What forward passes keep for backward passes of all micro-batches in flight, at the peak: what the
    /// head reads is in it, and what is made again or deferred. What flows between layers and ranks is not: it
    /// is measured as `transient`.
    pub activations: u64,
    /// Samples that stay on the device for the whole of the run; nothing before it is known that they fit there.
    pub data: u64,
    /// Where weights rest compressed or in shards, the blocks that are dense at once. Scratch space of the
    /// kernels, packed operands and copies on the host come on top: theirs to know, so not predicted. The
    /// ledger measures them; `tensor` holds each operation to a bound that its sizes and the number of
    /// threads give.
    pub workspace: Option<u64>,
    /// Buffers of messages to other ranks, which small gradients are packed into; nothing on one rank. Where
    /// gradients are scattered as they are made they are messages from the beginning, and this is the most
    /// that they can take, beside the weights of a block that are gathered ahead of it.
    pub communication: u64,
}

impl MemoryPlan {
    /// Both, category by category.
    pub(crate) fn with(self, other: MemoryPlan, both: impl Fn(u64, u64) -> u64) -> MemoryPlan {
        MemoryPlan {
            weights: both(self.weights, other.weights),
            weights_at_rest: both(self.weights_at_rest, other.weights_at_rest),
            gradients: both(self.gradients, other.gradients),
            optimizer: both(self.optimizer, other.optimizer),
            mask: both(self.mask, other.mask),
            scoring: both(self.scoring, other.scoring),
            setup: both(self.setup, other.setup),
            scores_beside_state: self.scores_beside_state || other.scores_beside_state,
            activations: both(self.activations, other.activations),
            data: both(self.data, other.data),
            workspace: match (self.workspace, other.workspace) {
                (None, None) => None,
                (own, other) => Some(both(own.unwrap_or(0), other.unwrap_or(0))),
            },
            communication: both(self.communication, other.communication),
        }
    }

    /// What is held at one moment at least: gradients may come as activations go, and scratch space of the
    /// kernels and messages are not counted.
    pub fn least(&self) -> u64 {
        let state = [self.weights_at_rest, self.optimizer, self.mask, self.gradients.max(self.activations)];
        let training = state.into_iter().chain(self.workspace).fold(0, u64::saturating_add);
        training.max(self.weights).saturating_add(self.data)
    }

    /// All that is predicted.
    pub fn total(&self) -> u64 {
        // Scoring is over before there are gradients.
        let state = self.optimizer.saturating_add(self.mask);
        let gradients = self.gradients.saturating_add(self.communication);
        let (state, before) = match self.scores_beside_state {
            true => (state.saturating_add(gradients.max(self.scoring)), 0),
            false => (state.saturating_add(gradients), self.scoring),
        };
        let before = before.max(self.setup);
        let training = self.weights_at_rest.saturating_add(state);
        let most = training.max(self.weights.saturating_add(before));
        [most, self.activations, self.data].into_iter().chain(self.workspace).fold(0, u64::saturating_add)
    }
}
