//! What a rank holds of the parameters: its shard of those of a layer that is cut, all of the others.

use std::ops::Range;

use super::super::Shard;
use super::Sharder;
use crate::spec::{Conv, Layer, Linear, WeightOrder};

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

    /// Some outputs of a linear layer.
    pub(super) fn columns(&mut self, linear: &Linear, own: &[Range<usize>], is_partial: bool) -> Linear {
        let Linear { name, input, output, order, .. } = linear;
        let (shape, dim) = match order {
            WeightOrder::OutIn => ([*output, *input], 0),
            WeightOrder::InOut => ([*input, *output], 1),
        };
        self.hold(&format!("{name}.weight"), Shard::full(&shape).narrow(dim, own), is_partial);
        if linear.bias {
            self.hold(&format!("{name}.bias"), Shard::full(&[*output]).narrow(0, own), is_partial);
        }
        Linear { output: own.iter().map(ExactSizeIterator::len).sum(), ..linear.clone() }
    }

    /// Some inputs of a linear layer, whose bias is added after the sum.
    pub(super) fn rows(&mut self, linear: &Linear, own: &Range<usize>) -> Linear {
        let Linear { name, input, output, order, .. } = linear;
        let (shape, dim) = match order {
            WeightOrder::OutIn => ([*output, *input], 1),
            WeightOrder::InOut => ([*input, *output], 0),
        };
        let shard = Shard::full(&shape).narrow(dim, std::slice::from_ref(own));
        self.hold(&format!("{name}.weight"), shard, false);
        Linear { input: own.len(), bias: false, ..linear.clone() }
    }

    /// Some outputs of a convolution.
    pub(super) fn channels(&mut self, conv: &Conv, own: &Range<usize>) -> Conv {
        let local = Conv { output: own.len(), ..conv.clone() };
        for parameter in Layer::Conv(conv.clone()).parameters() {
            let shard = Shard::full(&parameter.shape).narrow(0, std::slice::from_ref(own));
            self.hold(&parameter.name, shard, false);
        }
        local
    }
}
