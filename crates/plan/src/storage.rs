//! In which form a rank keeps what it trains: weights, gradients, the optimizer's state, activations.

use crate::spec::{Precision, RecomputeMode};

/// Forms and bytes of what is kept for each weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageForms {
    /// What weights, activations and the gradient of one micro-batch are stored in.
    pub precision: Precision,
    /// What of the activations is computed twice instead of kept.
    pub recompute: RecomputeMode,
    /// Bytes of optimizer state for each weight that has it: its exact value where it is rounded, and moments.
    pub optimizer_bytes: u64,
    /// How many moments, or velocities, are in them.
    pub moments: u64,
    /// Whether the gradient of a step is a sum over several micro-batches.
    pub accumulates: bool,
    /// Whether gradients and optimizer state of pruned parameters hold kept weights alone.
    pub compressed: bool,
    /// Whether pruned weights rest as kept values too, and are dense only while their block runs.
    pub compressed_weights: bool,
}

impl StorageForms {
    /// Bytes of each number of a gradient while it is made: that of one micro-batch has the precision of the
    /// run, a sum over several is f32. In bf16 a sum of 256 equal numbers stands still.
    pub fn gradient_bytes(&self) -> u64 {
        if self.accumulates { 4 } else { self.precision.size() }
    }

    /// Vectors of f32 in which ranks that step by themselves average a parameter: its exact weight, and each
    /// moment.
    pub(crate) fn averaged_vectors(&self) -> u64 {
        1 + self.moments
    }
}
