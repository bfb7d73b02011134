//! What ranks do with an activation before and behind a layer that is cut.

use super::TensorSharder;
use crate::spec::{CollectiveLayer, CollectiveOp, LayerSpec, Shape, ShardDim};
use crate::split::split;

impl TensorSharder<'_> {
    /// Whether what every rank has in plain tensor parallelism is cut along the sequence here.
    pub(super) fn cuts(&self, shape: Shape) -> bool {
        self.tensor_split.sequence && matches!(shape, Shape::Sequence { .. })
    }

    pub(super) fn exchange(&self, forward: CollectiveOp, backward: CollectiveOp, extent: usize) -> LayerSpec {
        let parts = (0..self.tensor_split.ranks)
            .map(|rank| split(extent, self.tensor_split.ranks, rank).len())
            .collect();
        LayerSpec::Collective(CollectiveLayer {
            axis: self.tensor_split.axis,
            forward,
            backward,
            parts,
            rank: self.tensor_split.rank,
        })
    }

    /// Before a layer that is cut by its outputs; nothing where nobody wants the gradient of what it reads.
    pub(super) fn enter(&self, shape: Shape) -> Option<LayerSpec> {
        if self.cuts(shape) {
            let (forward, backward) = (
                CollectiveOp::AllGather(ShardDim::Sequence),
                CollectiveOp::ReduceScatter(ShardDim::Sequence),
            );
            return Some(self.exchange(forward, backward, positions(shape)));
        }
        self.trained.then(|| self.exchange(CollectiveOp::Identity, CollectiveOp::AllReduce, 0))
    }

    /// Behind a layer that is cut by its inputs.
    pub(super) fn leave(&self, shape: Shape) -> LayerSpec {
        match self.cuts(shape) {
            true => {
                let (forward, backward) = (
                    CollectiveOp::ReduceScatter(ShardDim::Sequence),
                    CollectiveOp::AllGather(ShardDim::Sequence),
                );
                self.exchange(forward, backward, positions(shape))
            }
            false => self.exchange(CollectiveOp::AllReduce, CollectiveOp::Identity, 0),
        }
    }

    /// Before a layer that every rank runs on the whole sequence: all have the same gradient.
    pub(super) fn gathered(&self, shape: Shape) -> Option<LayerSpec> {
        let (forward, backward) =
            (CollectiveOp::AllGather(ShardDim::Sequence), CollectiveOp::Slice(ShardDim::Sequence));
        self.cuts(shape).then(|| self.exchange(forward, backward, positions(shape)))
    }

    /// Behind such a layer: each goes on with its part of the sequence.
    pub(super) fn sliced(&self, shape: Shape) -> LayerSpec {
        self.exchange(
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
