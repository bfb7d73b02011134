//! How the samples of a step are cut: over replicas, into micro-batches, and for batch norms into groups.

use serde::{Deserialize, Serialize};

/// The samples of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSizes {
    /// All of them, over all ranks.
    pub samples: usize,
    /// Ranks along the data axis, which take equal slices of them.
    pub replicas: usize,
    /// Gradient-accumulation steps of a replica's slice, one after the other.
    pub micro_batches: usize,
    /// Samples that a rank runs at a time.
    pub micro_batch: usize,
    /// Over which ranks' samples batch norm takes its statistics.
    pub norm: BatchNormSync,
    /// Samples of a rank's micro-batch that are normalised together (ghost batch norm); none: all of them.
    pub norm_group: Option<usize>,
}

impl BatchSizes {
    /// Whether statistics are taken over the micro-batches of all replicas.
    pub fn synchronises_norms(&self) -> bool {
        self.norm == BatchNormSync::Synchronised
    }
}

/// The samples that a batch norm sees at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BatchNormSync {
    /// A rank's own micro-batch; running statistics are the mean over ranks.
    #[default]
    Local,
    /// The micro-batches of all ranks, as if one had them all.
    Synchronised,
}
