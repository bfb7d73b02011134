//! The collectives before and behind a layer that is split.

use super::TensorSharder;
use crate::spec::{CollectiveLayer, CollectiveOp, LayerSpec, Shape, ShardDim};
use crate::split::split;

impl TensorSharder<'_> {
    /// Whether what every rank has in plain tensor parallelism is split along the sequence here.
    pub(super) fn splits_sequence(&self, shape: Shape) -> bool {
        self.tensor_split.sequence && matches!(shape, Shape::Sequence { .. })
    }

    pub(super) fn collective(&self, forward: CollectiveOp, backward: CollectiveOp, size: usize) -> LayerSpec {
        let shard_sizes = (0..self.tensor_split.ranks)
            .map(|rank| split(size, self.tensor_split.ranks, rank).len())
            .collect();
        LayerSpec::Collective(CollectiveLayer {
            axis: self.tensor_split.axis,
            forward,
            backward,
            shard_sizes,
            rank: self.tensor_split.rank,
        })
    }

    /// Before a layer that is split by its outputs; nothing where nobody wants the gradient of what it reads.
    pub(super) fn enter(&self, shape: Shape) -> Option<LayerSpec> {
        if self.splits_sequence(shape) {
            let (forward, backward) = (
                CollectiveOp::AllGather(ShardDim::Sequence),
                CollectiveOp::ReduceScatter(ShardDim::Sequence),
            );
            return Some(self.collective(forward, backward, positions(shape)));
        }
        self.trained.then(|| self.collective(CollectiveOp::Identity, CollectiveOp::AllReduce, 0))
    }

    /// Behind a layer that is split by its inputs.
    pub(super) fn leave(&self, shape: Shape) -> LayerSpec {
        match self.splits_sequence(shape) {
            true => {
                let (forward, backward) = (
                    CollectiveOp::ReduceScatter(ShardDim::Sequence),
                    CollectiveOp::AllGather(ShardDim::Sequence),
                );
                self.collective(forward, backward, positions(shape))
            }
            false => self.collective(CollectiveOp::AllReduce, CollectiveOp::Identity, 0),
        }
    }

    /// Before a layer that every rank runs on the full sequence: all have the same gradient.
    pub(super) fn gathered(&self, shape: Shape) -> Option<LayerSpec> {
        let (forward, backward) =
            (CollectiveOp::AllGather(ShardDim::Sequence), CollectiveOp::Slice(ShardDim::Sequence));
        self.splits_sequence(shape).then(|| self.collective(forward, backward, positions(shape)))
    }

    /// Behind such a layer: each rank continues with its slice of the sequence.
    pub(super) fn sliced(&self, shape: Shape) -> LayerSpec {
        self.collective(
            CollectiveOp::Slice(ShardDim::Sequence),
            CollectiveOp::AllGather(ShardDim::Sequence),
            positions(shape),
        )
    }
}

fn positions(shape: Shape) -> usize {
    match shape {
        Shape::Sequence { seq, .. } => seq,
        other => unreachable!("only sequences are cut along the sequence, not {other}"),
    }
}
