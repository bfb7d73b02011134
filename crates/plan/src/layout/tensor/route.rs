//! The layers of a rank along a route: each finds its input as the route says, moved there where the layer before left it otherwise.
//!
//! | a layer that multiplies | what a rank runs |
//! |---|---|
//! | from samples to samples | all of it on its samples; its gradients are summands |
//! | from rows to rows | the same on its tile of the image, which `spatial` makes of it |
//! | from whole to columns | `enter`, its outputs |
//! | from columns to whole | its inputs, `leave`, bias |

use std::convert::Infallible;

use super::{Classes, Sharded, Sharder, finish};
use crate::cost::integrated::{Split, Stop};
use crate::layout::{Shard, norms};
use crate::spec::{Along, Counted, Layer, Model, Move, Parameter, Shape};

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
            match layer.entry().sides() {
                Some(_) => built.push(self.sides(layer, *shape, stop, stops)),
                None => {
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
    fn sides(
        &mut self,
        layer: &Layer,
        input: Shape,
        stop: Stop,
        stops: &mut std::slice::Iter<'_, Stop>,
    ) -> Layer {
        let before = self.trained;
        let mut trained = before;
        let Ok(built) = layer.map_sides(|way| {
            self.trained = before;
            let (mut shape, mut split) = (input, stop.from);
            let mut layers = self.along(way, &mut shape, &mut split, stops, false);
            layers.extend(self.moved(split, stop.to, shape));
            trained |= self.trained;
            Ok::<_, Infallible>(layers)
        });
        self.trained = trained;
        built
    }

    /// One layer.
    fn at_stop(&mut self, layer: &Layer, stop: Stop, shape: Shape, is_head: bool, built: &mut Vec<Layer>) {
        let (entry, ranks, rank) = (layer.entry(), self.part.ranks, self.part.rank);
        match (entry.properties().product_size, stop.from, stop.to) {
            (Some(size), Split::Whole, Split::Columns) => {
                let own = self.own(size.output);
                built.extend(self.enter(shape));
                built.push(self.split_outputs(layer, std::slice::from_ref(&own), false));
                if is_head {
                    self.classes = Some(Classes { axis: self.part.axis, ranks, own });
                }
            }
            (Some(size), Split::Columns, Split::Whole) => {
                self.split_inputs(layer, &self.own(size.input), shape, built);
            }
            (_, Split::Columns, _) => {
                let own = self.own(shape.last());
                let elements = Counted::Runs { first: own.start, run: own.len(), of: shape.last() };
                built.push(entry.counting(elements).unwrap_or_else(|| layer.clone()));
            }
            (_, Split::Samples, _) => {
                if let Some(channels) = entry.properties().batch_statistics {
                    built.push(norms::shared_by_samples(channels, self.part.axis));
                }
                for parameter in layer.parameters() {
                    self.hold(&parameter.name, Shard::full(&parameter.shape), true);
                }
                let elements = Counted::Samples { ranks, rank };
                built.push(entry.counting(elements).unwrap_or_else(|| layer.clone()));
            }
            _ => built.push(layer.clone()),
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
