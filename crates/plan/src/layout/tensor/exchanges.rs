//! What ranks do with an activation before and behind a layer that is cut.

use super::Sharder;
use crate::spec::{Along, Exchange, Layer, Move, Shape};
use crate::split::split;

impl Sharder<'_> {
    /// Whether what every rank has in plain tensor parallelism is cut along the sequence here.
    pub(super) fn cuts(&self, shape: Shape) -> bool {
        self.part.sequence && matches!(shape, Shape::Sequence { .. })
    }

    pub(super) fn exchange(&self, forward: Move, backward: Move, extent: usize) -> Layer {
        let parts = (0..self.part.ranks).map(|rank| split(extent, self.part.ranks, rank).len()).collect();
        Layer::Exchange(Exchange { axis: self.part.axis, forward, backward, parts, rank: self.part.rank })
    }

    /// Before a layer that is cut by its outputs; nothing where nobody wants the gradient of what it reads.
    pub(super) fn enter(&self, shape: Shape) -> Option<Layer> {
        if self.cuts(shape) {
            let (forward, backward) = (Move::Gather(Along::Sequence), Move::ReduceScatter(Along::Sequence));
            return Some(self.exchange(forward, backward, positions(shape)));
        }
        self.trained.then(|| self.exchange(Move::Nothing, Move::Sum, 0))
    }

    /// Behind a layer that is cut by its inputs.
    pub(super) fn leave(&self, shape: Shape) -> Layer {
        match self.cuts(shape) {
            true => {
                let (forward, backward) =
                    (Move::ReduceScatter(Along::Sequence), Move::Gather(Along::Sequence));
                self.exchange(forward, backward, positions(shape))
            }
            false => self.exchange(Move::Sum, Move::Nothing, 0),
        }
    }

    /// Before a layer that every rank runs on the whole sequence: all have the same gradient.
    pub(super) fn gathered(&self, shape: Shape) -> Option<Layer> {
        let (forward, backward) = (Move::Gather(Along::Sequence), Move::Slice(Along::Sequence));
        self.cuts(shape).then(|| self.exchange(forward, backward, positions(shape)))
    }

    /// Behind such a layer: each goes on with its part of the sequence.
    pub(super) fn sliced(&self, shape: Shape) -> Layer {
        self.exchange(Move::Slice(Along::Sequence), Move::Gather(Along::Sequence), positions(shape))
    }
}

fn positions(shape: Shape) -> usize {
    match shape {
        Shape::Sequence { seq, .. } => seq,
        other => unreachable!("only sequences are cut along the sequence, not {other}"),
    }
}
