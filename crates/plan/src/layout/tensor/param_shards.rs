//! What a rank holds of the parameters: its shard of those of a layer that is split, all of the others.

use std::ops::Range;

use super::super::Shard;
use super::TensorSharder;
use crate::spec::{LayerSpec, Shape};

/// What a rank holds of a parameter.
pub(super) struct ParamShard {
    pub shard: Shard,
    /// Whether ranks with the same shard have partial sums of its gradient.
    pub is_partial: bool,
}

impl TensorSharder<'_> {
    pub(super) fn hold(&mut self, name: &str, shard: Shard, is_partial: bool) {
        self.shards.insert(name.to_owned(), ParamShard { shard, is_partial });
    }

    /// The parameters of a layer that every rank has in full.
    pub(super) fn hold_full(&mut self, layer: &LayerSpec, is_partial: bool) {
        for parameter in layer.parameters() {
            self.hold(&parameter.name, Shard::full(&parameter.shape), is_partial);
        }
    }

    /// A layer with some of its outputs.
    pub(super) fn split_outputs(
        &mut self,
        layer: &LayerSpec,
        ranges: &[Range<usize>],
        is_partial: bool,
    ) -> LayerSpec {
        let shard =
            layer.description().split_outputs(ranges).expect("a layer that opens has outputs to split");
        self.hold_split(layer, &shard.dims, ranges, is_partial);
        shard.layer
    }

    /// A layer with some of its inputs, the reduction of what ranks make of theirs, and what is added to that.
    /// `shape` is what the full layer reads.
    pub(super) fn split_inputs(
        &mut self,
        layer: &LayerSpec,
        range: &Range<usize>,
        shape: Shape,
        built: &mut Vec<LayerSpec>,
    ) {
        let shard = layer.description().split_inputs(range).expect("a layer that closes has inputs to split");
        self.hold_split(layer, &shard.dims, std::slice::from_ref(range), false);
        let after = layer.output(shape).expect("the shapes were checked");
        built.extend([shard.layer, self.leave(after)]);
        // Partial sums where activations are split along the sequence.
        shard.behind.iter().for_each(|behind| self.hold_full(behind, self.tensor_split.sequence));
        built.extend(shard.behind);
    }

    fn hold_split(
        &mut self,
        layer: &LayerSpec,
        dims: &[Option<usize>],
        ranges: &[Range<usize>],
        is_partial: bool,
    ) {
        for (parameter, dim) in layer.parameters().iter().zip(dims) {
            if let Some(dim) = *dim {
                self.hold(&parameter.name, Shard::full(&parameter.shape).narrow(dim, ranges), is_partial);
            }
        }
    }
}
