//! From what is written to what is decided: one function a decision.

use std::time::Duration;

use super::{Parallel, PipelineConfig, Precision, RunFile};
use crate::batch::{BatchNormSync, BatchSizes};
use crate::data_parallel::DataParallelMode;
use crate::intervals::TrainIntervals;
use crate::layout::{Mixing, Partition};
use crate::mesh::Mesh;
use crate::optimization::Optimization;
use crate::pipeline::{PipelinePlan, ScheduleSource};
use crate::pruning::WeightForm;
use crate::schedule::{ScheduleName, Updates};
use crate::storage::StorageForms;

/// A number, where 0 stands for none.
fn some(number: usize) -> Option<u64> {
    (number > 0).then_some(number as u64)
}

impl RunFile {
    /// How the samples of a step are cut.
    pub(crate) fn batch(&self) -> BatchSizes {
        let (train, replicas) = (&self.train, self.parallel.data);
        BatchSizes {
            samples: train.batch,
            replicas,
            micro_batches: train.micro_batches,
            micro_batch: train.batch / (replicas * train.micro_batches),
            norm: self.parallel.batch_norm,
            norm_group: some(train.batch_norm_group).map(|group| group as usize),
        }
    }

    /// In which form a rank keeps what it trains.
    pub(crate) fn storage(&self) -> StorageForms {
        let precision = self.train.precision;
        let master = match precision {
            Precision::F32 => 0,
            Precision::Bf16 => self.optimizer.master.bytes(),
        };
        let moments = self.optimizer.moments();
        let optimizer_bytes = master + self.optimizer.moments.bytes() * moments;
        // Not of accumulated gradients: the form of a checkpoint must not depend on the number of micro-batches.
        let beside = precision.size() + optimizer_bytes;
        // Ranks that shard state shard that of kept weights.
        let compressed =
            self.prune.as_ref().is_some_and(|prune| self.parallel.zero > 0 || prune.compresses(beside));
        let accumulates = self.train.micro_batches > 1 && self.updates() != Updates::EveryMicroBatch;
        // Shards of weights are shards of what is kept of them.
        let shards_weights = self.data_parallel().shards_weights();
        let compressed_weights = self
            .prune
            .as_ref()
            .is_some_and(|prune| shards_weights || prune.weights == WeightForm::Compressed);
        StorageForms {
            precision,
            recompute: self.train.recompute,
            optimizer_bytes,
            moments,
            accumulates,
            compressed,
            compressed_weights,
        }
    }

    /// What is done with the gradient of a step.
    pub(crate) fn optimization(&self) -> Optimization {
        let train = &self.train;
        Optimization {
            optimizer: self.optimizer,
            learning_rate: self.learning_rate.for_batch(train.batch),
            clip: Some(train.clip).filter(|clip| *clip > 0.0),
            max_bad_steps: train.max_bad_steps as u64,
            noise_scale: train.noise_scale,
        }
    }

    /// How replicas come to the same weights.
    pub(crate) fn data_parallel(&self) -> DataParallelMode {
        let parallel = &self.parallel;
        match (parallel.zero, parallel.average_every) {
            (0, every @ 2..) => {
                DataParallelMode::Local { every: every as u64, after: parallel.local_after as u64 }
            }
            (stage, _) => DataParallelMode::of_stage(stage),
        }
    }

    /// How tensors are cut.
    pub(crate) fn cuts(&self) -> Partition {
        let Parallel { tensor, sequence, ref linear, spatial, data, batch_norm, .. } = self.parallel;
        let synchronised = data > 1 && batch_norm == BatchNormSync::Synchronised;
        let integrated = self.parallel.integrated.clone().map(|mixture| Mixing {
            mixture,
            samples: self.train.batch / data,
            word: self.train.precision.size(),
            pruning: self.prune.clone(),
        });
        Partition { tensor, sequence, linear: linear.clone(), grid: spatial.0, synchronised, integrated }
    }

    /// Which ranks there are.
    pub(crate) fn mesh(&self) -> Mesh {
        Mesh::new(self.parallel.axis_sizes()).expect("every axis has at least one rank")
    }

    /// The stages, and the order in which they work.
    pub(crate) fn stages_and_order(&self) -> PipelinePlan {
        let unpipelined =
            || ScheduleSource::Named { name: ScheduleName::OneFOneB, chunks: None, pipelines: None };
        let written = self.parallel.pipeline.as_ref();
        PipelinePlan {
            stages: self.parallel.stages(),
            micro_batches: self.train.micro_batches,
            order: written.map_or_else(unpipelined, PipelineConfig::order),
            drain: written.map_or(0, PipelineConfig::drains_every),
        }
    }

    /// The first block of every virtual stage but the first, where that is said.
    pub(crate) fn cut(&self) -> &[usize] {
        self.parallel.pipeline.as_ref().map_or(&[], |pipeline| &pipeline.cut)
    }

    /// What happens after which step.
    pub(crate) fn intervals(&self) -> TrainIntervals {
        let train = &self.train;
        TrainIntervals {
            length: train.length,
            eval_every: some(train.eval_every),
            eval_samples: some(train.eval_samples).map(|samples| samples as usize),
            eval_batch: some(train.eval_batch).map(|samples| samples as usize),
            log_every: train.log_every as u64,
            checkpoint: self.checkpoint,
        }
    }

    /// How long a rank waits for another.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.parallel.timeout_s as u64)
    }

    fn updates(&self) -> Updates {
        self.parallel.pipeline.as_ref().map_or(Updates::Flush, |pipeline| pipeline.schedule.updates())
    }
}
