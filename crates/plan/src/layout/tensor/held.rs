//! What a rank holds of the parameters: its shard of those of a layer that is cut, all of the others.

use std::ops::Range;

use super::super::Shard;
use super::Sharder;
use crate::spec::{Layer, Shape};

/// What a rank holds of a parameter.
pub(super) struct Held {
    pub shard: Shard,
    /// Whether all who have the same have a summand of its gradient.
    pub is_partial: bool,
}

impl Sharder<'_> {
    pub(super) fn hold(&mut self, name: &str, shard: Shard, is_partial: bool) {
        self.held.insert(name.to_owned(), Held { shard, is_partial });
    }

    /// A parameter that every rank has, where activations are cut along the sequence.
    pub(super) fn whole(&mut self, name: &str, shape: &[usize]) {
        self.hold(name, Shard::full(shape), self.part.sequence);
    }

    pub(super) fn whole_of(&mut self, layer: &Layer) {
        for parameter in layer.parameters() {
            self.whole(&parameter.name, &parameter.shape);
        }
    }

    /// A layer with some of its outputs.
    pub(super) fn split_outputs(&mut self, layer: &Layer, own: &[Range<usize>], is_partial: bool) -> Layer {
        let shard = layer.entry().split_outputs(own).expect("a layer that opens has outputs to split");
        self.hold_split(layer, &shard.dims, own, is_partial);
        shard.layer
    }

    /// A layer with some of its inputs, the sum of what ranks make of theirs, and what is added to that. `shape` is what the whole
    /// layer reads.
    pub(super) fn split_inputs(
        &mut self,
        layer: &Layer,
        own: &Range<usize>,
        shape: Shape,
        built: &mut Vec<Layer>,
    ) {
        let shard = layer.entry().split_inputs(own).expect("a layer that closes has inputs to split");
        self.hold_split(layer, &shard.dims, std::slice::from_ref(own), false);
        let after = layer.output(shape).expect("the shapes were checked");
        built.extend([shard.layer, self.leave(after)]);
        shard.behind.iter().for_each(|behind| self.whole_of(behind));
        built.extend(shard.behind);
    }

    fn hold_split(&mut self, layer: &Layer, dims: &[Option<usize>], own: &[Range<usize>], is_partial: bool) {
        for (parameter, dim) in layer.parameters().iter().zip(dims) {
            if let Some(dim) = *dim {
                self.hold(&parameter.name, Shard::full(&parameter.shape).narrow(dim, own), is_partial);
            }
        }
    }
}
