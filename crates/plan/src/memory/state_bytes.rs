//! Bytes for each weight, as papers on pruning count them.

use serde::{Deserialize, Serialize};

use crate::data_parallel::DataParallelMode;
use crate::pruning::Pruning;
use crate::storage::StorageForms;

/// Bytes for each weight that pruning may touch, once it has.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StateBytes {
    /// The weights that kernels read.
    pub weights: f64,
    /// Gradients as they are accumulated.
    pub gradients: f64,
    /// Master weights and moments.
    pub optimizer: f64,
    /// A bit, or an index, that says whether the weight is kept.
    pub mask: f64,
}

impl StateBytes {
    /// The prediction for a run.
    pub fn predict(
        storage: StorageForms,
        data_parallel: DataParallelMode,
        replicas: usize,
        pruning: Option<&Pruning>,
    ) -> StateBytes {
        let kept = pruning.map_or(1.0, |pruning| 1.0 - pruning.sparsity);
        let share = if storage.compressed { kept } else { 1.0 };
        let shards = |is_shared: bool| if is_shared { replicas as f64 } else { 1.0 };
        StateBytes {
            weights: if storage.compressed_weights { kept } else { 1.0 } * storage.precision.size() as f64
                / shards(data_parallel.shards_weights()),
            gradients: share * storage.gradient_bytes() as f64 / shards(data_parallel.scatters_gradients()),
            optimizer: share * storage.optimizer_bytes as f64 / shards(data_parallel.is_sharded()),
            mask: if pruning.is_some() { (0.125f64 + 1.0 / 128.0).min(4.0 * kept) } else { 0.0 },
        }
    }

    /// Bytes a weight in all.
    pub fn total(&self) -> f64 {
        self.weights + self.gradients + self.optimizer + self.mask
    }
}
