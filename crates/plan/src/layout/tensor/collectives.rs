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
        match self.splits_sequence(shape) {
            true => Some(self.of_sequence([CollectiveOp::AllGather, CollectiveOp::ReduceScatter], shape)),
            false => {
                self.trained.then(|| self.collective(CollectiveOp::Identity, CollectiveOp::AllReduce, 0))
            }
        }
    }

    /// Behind a layer that is split by its inputs.
    pub(super) fn leave(&self, shape: Shape) -> LayerSpec {
        match self.splits_sequence(shape) {
            true => self.of_sequence([CollectiveOp::ReduceScatter, CollectiveOp::AllGather], shape),
            false => self.collective(CollectiveOp::AllReduce, CollectiveOp::Identity, 0),
        }
    }

    /// Before a layer that every rank runs on the full sequence: all have the same gradient.
    pub(super) fn gathered(&self, shape: Shape) -> Option<LayerSpec> {
        let gather = || self.of_sequence([CollectiveOp::AllGather, CollectiveOp::Slice], shape);
        self.splits_sequence(shape).then(gather)
    }

    /// Behind such a layer: each rank continues with its slice of the sequence.
    pub(super) fn sliced(&self, shape: Shape) -> LayerSpec {
        self.of_sequence([CollectiveOp::Slice, CollectiveOp::AllGather], shape)
    }

    /// Of the outputs of a layer that is split by them.
    pub(super) fn gather_features(&self, outputs: usize) -> LayerSpec {
        let (forward, backward) = (CollectiveOp::AllGather, CollectiveOp::Slice);
        self.collective(forward(ShardDim::Last), backward(ShardDim::Last), outputs)
    }

    fn of_sequence(&self, [forward, backward]: [fn(ShardDim) -> CollectiveOp; 2], shape: Shape) -> LayerSpec {
        self.collective(forward(ShardDim::Sequence), backward(ShardDim::Sequence), positions(shape))
    }
}

fn positions(shape: Shape) -> usize {
    match shape {
        Shape::Sequence { seq, .. } => seq,
        other => unreachable!("only sequences are cut along the sequence, not {other}"),
    }
}
