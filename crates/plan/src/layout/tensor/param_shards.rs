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

    /// A parameter that every rank has in full: its gradients are partial sums where activations are split
    /// along the sequence.
    pub(super) fn hold_full(&mut self, name: &str, shape: &[usize]) {
        self.hold(name, Shard::full(shape), self.tensor_split.sequence);
    }

    pub(super) fn hold_layer_full(&mut self, layer: &LayerSpec) {
        for parameter in layer.parameters() {
            self.hold_full(&parameter.name, &parameter.shape);
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
        shard.behind.iter().for_each(|behind| self.hold_layer_full(behind));
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
