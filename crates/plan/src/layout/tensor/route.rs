//! The layers of a rank along a route: each finds its input as the route says, moved there where the layer before left it otherwise.
//!
//! | a layer that multiplies | what a rank runs |
//! |---|---|
//! | from samples to samples | all of it on its samples; its gradients are summands |
//! | from rows to rows | the same on its tile of the image, which `spatial` makes of it |
//! | from whole to columns | `enter`, its outputs |
//! | from columns to whole | its inputs, `leave`, bias |

use super::{Classes, Held, Sharded, Sharder, finish};
use crate::cost::integrated::{Split, Stop};
use crate::layout::{Shard, norms};
use crate::spec::{Along, Bias, Branches, Counted, Dropout, Layer, Model, Move, Parameter, Residual, Shape};

/// The layers of a rank for a model whose layers go along a route.
pub(in crate::layout) fn follow(
    model: &Model,
    whole: &[Parameter],
    part: super::Part<'_>,
    route: &[Stop],
) -> Sharded {
    let mut sharder = Sharder::new(part);
    let (mut local, mut stops) = (model.clone(), route.iter());
    let mut shape = model.input.shape();
    let mut split = route.first().map_or(Split::Whole, |stop| match stop.from {
        Split::Rows => Split::Rows,
        _ => Split::Whole,
    });
    let last = model.blocks.len() - 1;
    for (i, block) in model.blocks.iter().enumerate() {
        local.blocks[i].layers = sharder.along(&block.layers, &mut shape, &mut split, &mut stops, i == last);
    }
    // Every rank has the loss of the whole batch.
    if split == Split::Samples {
        local.blocks[last].layers.extend(sharder.moved(split, Split::Whole, shape));
    }
    finish(sharder, local, whole)
}

impl Sharder<'_> {
    fn along(
        &mut self,
        layers: &[Layer],
        shape: &mut Shape,
        split: &mut Split,
        stops: &mut std::slice::Iter<'_, Stop>,
        ends: bool,
    ) -> Vec<Layer> {
        let mut built = Vec::new();
        for (i, layer) in layers.iter().enumerate() {
            let stop = *stops.next().expect("a route has a stop for each layer");
            built.extend(self.moved(*split, stop.from, *shape));
            match layer {
                Layer::Residual(Residual { branch, shortcut }) => {
                    let mut sides = self.sides([branch, shortcut], *shape, stop, stops).into_iter();
                    let mut next = || sides.next().expect("two ways");
                    built.push(Layer::Residual(Residual { branch: next(), shortcut: next() }));
                }
                Layer::Branches(Branches { join, branches }) => {
                    let branches = self.sides(branches, *shape, stop, stops);
                    built.push(Layer::Branches(Branches { join: *join, branches }));
                }
                layer => {
                    let is_head = ends && i + 1 == layers.len();
                    self.at_stop(layer, stop, *shape, is_head, &mut built);
                }
            }
            (*split, *shape) = (stop.to, layer.output(*shape).expect("the shapes were checked"));
            self.trained |= !layer.parameters().is_empty();
        }
        built
    }

    /// Ways that part here and meet again, all in the same split.
    fn sides<'a>(
        &mut self,
        ways: impl IntoIterator<Item = &'a Vec<Layer>>,
        input: Shape,
        stop: Stop,
        stops: &mut std::slice::Iter<'_, Stop>,
    ) -> Vec<Vec<Layer>> {
        let before = self.trained;
        let mut trained = before;
        let mut built = Vec::new();
        for way in ways {
            self.trained = before;
            let (mut shape, mut split) = (input, stop.from);
            let mut layers = self.along(way, &mut shape, &mut split, stops, false);
            layers.extend(self.moved(split, stop.to, shape));
            trained |= self.trained;
            built.push(layers);
        }
        self.trained = trained;
        built
    }

    /// One layer.
    fn at_stop(&mut self, layer: &Layer, stop: Stop, shape: Shape, is_head: bool, built: &mut Vec<Layer>) {
        let (ranks, rank) = (self.part.ranks, self.part.rank);
        match (layer, stop.from, stop.to) {
            (Layer::Linear(linear), Split::Whole, Split::Columns) => {
                let own = self.own(linear.output);
                built.extend(self.enter(shape));
                built.push(Layer::Linear(self.columns(linear, std::slice::from_ref(&own), false)));
                if is_head {
                    self.classes = Some(Classes { axis: self.part.axis, ranks: self.part.ranks, own });
                }
            }
            (Layer::Linear(linear), Split::Columns, Split::Whole) => {
                let own = self.own(linear.input);
                built.push(Layer::Linear(self.rows(linear, &own)));
                built.push(self.exchange(Move::Sum, Move::Nothing, 0));
                if linear.bias {
                    built.push(Layer::Bias(Bias { name: linear.name.clone(), width: linear.output }));
                }
            }
            (Layer::Conv(conv), Split::Whole, Split::Columns) => {
                let own = self.own(conv.output);
                built.extend(self.enter(shape));
                built.push(Layer::Conv(self.channels(conv, &own)));
            }
            (Layer::Dropout(Dropout { rate, .. }), Split::Columns, _) => {
                let own = self.own(shape.last());
                let counted = Some(Counted::Runs { first: own.start, run: own.len(), of: shape.last() });
                built.push(Layer::Dropout(Dropout { rate: *rate, counted }));
            }
            (Layer::Dropout(Dropout { rate, .. }), Split::Samples, _) => {
                let counted = Some(Counted::Samples { ranks, rank });
                built.push(Layer::Dropout(Dropout { rate: *rate, counted }));
            }
            (layer, Split::Samples, _) => {
                if let Layer::BatchNorm(norm) = layer {
                    built.push(norms::shared_by_samples(norm, self.part.axis));
                }
                for parameter in layer.parameters() {
                    let held = Held { shard: Shard::full(&parameter.shape), is_partial: true };
                    self.held.insert(parameter.name, held);
                }
                built.push(layer.clone());
            }
            (layer, ..) => built.push(layer.clone()),
        }
    }

    /// An activation on its way from one split to another.
    fn moved(&self, from: Split, to: Split, shape: Shape) -> Option<Layer> {
        let one_way = |from, to| match (from, to) {
            (Split::Samples, Split::Whole) => Move::Gather(Along::Samples),
            (Split::Whole, Split::Samples) => Move::Slice(Along::Samples),
            (Split::Columns, Split::Whole) => Move::Gather(Along::Last),
            (Split::Whole, Split::Columns) => Move::Slice(Along::Last),
            (Split::Samples, Split::Columns) => Move::Deal { from: Along::Samples, to: Along::Last },
            (Split::Columns, Split::Samples) => Move::Deal { from: Along::Last, to: Along::Samples },
            (from, to) => unreachable!("no route goes from {from:?} to {to:?} between two layers"),
        };
        // Nobody wants the gradient of what no layer has trained.
        let backward = || if self.trained { one_way(to, from) } else { Move::Nothing };
        (from != to).then(|| self.exchange(one_way(from, to), backward(), shape.last()))
    }
}
