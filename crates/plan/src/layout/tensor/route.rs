//! The layers of a rank along a route: each finds its input as the route says, moved there where the layer
//! before left it otherwise.
//!
//! | a layer that multiplies | what a rank runs |
//! |---|---|
//! | from samples to samples | all of it on its samples; its gradients are partial sums |
//! | from rows to rows | the same on its tile of the image, which `spatial` makes of it |
//! | from replicated to features | `enter`, its outputs |
//! | from features to replicated | its inputs, `leave`, bias |

use std::convert::Infallible;

use super::{ClassShard, ShardedModel, TensorSharder, finish};
use crate::cost::integrated::ActivationSplit::{self, Features, Replicated, Rows, Samples};
use crate::cost::integrated::LayerSplit;
use crate::layout::norms;
use crate::spec::{CollectiveOp, DropoutIndices, LayerSpec, ModelSpec, Parameter, Shape, ShardDim};

/// The layers of a rank for a model whose layers go along a route.
pub(in crate::layout) fn follow(
    model: &ModelSpec,
    full: &[Parameter],
    tensor_split: super::TensorSplit<'_>,
    route: &[LayerSplit],
) -> ShardedModel {
    let mut sharder = TensorSharder::new(tensor_split);
    let (mut local, mut stops) = (model.clone(), route.iter());
    let mut shape = model.input.shape();
    let mut split = route.first().map_or(Replicated, |stop| match stop.from {
        Rows => Rows,
        _ => Replicated,
    });
    let last = model.blocks.len() - 1;
    for (i, block) in model.blocks.iter().enumerate() {
        local.blocks[i].layers = sharder.along(&block.layers, &mut shape, &mut split, &mut stops, i == last);
    }
    // Every rank has the loss of the whole batch.
    if split == Samples {
        local.blocks[last].layers.extend(sharder.moved(split, Replicated, shape));
    }
    finish(sharder, local, full)
}

impl TensorSharder<'_> {
    fn along(
        &mut self,
        layers: &[LayerSpec],
        shape: &mut Shape,
        split: &mut ActivationSplit,
        stops: &mut std::slice::Iter<'_, LayerSplit>,
        ends: bool,
    ) -> Vec<LayerSpec> {
        let mut built = Vec::new();
        for (i, layer) in layers.iter().enumerate() {
            let stop = *stops.next().expect("a route has a stop for each layer");
            built.extend(self.moved(*split, stop.from, *shape));
            match layer.description().branches() {
                Some(_) => built.push(self.branches(layer, *shape, stop, stops)),
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

    /// All branches begin in the same split, and end in the same.
    fn branches(
        &mut self,
        layer: &LayerSpec,
        input: Shape,
        stop: LayerSplit,
        stops: &mut std::slice::Iter<'_, LayerSplit>,
    ) -> LayerSpec {
        let before = self.trained;
        let mut trained = before;
        let Ok(built) = layer.map_branches(|branch| {
            self.trained = before;
            let (mut shape, mut split) = (input, stop.from);
            let mut layers = self.along(branch, &mut shape, &mut split, stops, false);
            layers.extend(self.moved(split, stop.to, shape));
            trained |= self.trained;
            Ok::<_, Infallible>(layers)
        });
        self.trained = trained;
        built
    }

    /// A layer without branches.
    fn at_stop(
        &mut self,
        layer: &LayerSpec,
        stop: LayerSplit,
        shape: Shape,
        is_head: bool,
        built: &mut Vec<LayerSpec>,
    ) {
        let (entry, ranks, rank) = (layer.description(), self.tensor_split.ranks, self.tensor_split.rank);
        match (entry.properties().product_size, stop.from, stop.to) {
            (Some(size), Replicated, Features) => {
                let range = self.local_range(size.output);
                built.extend(self.enter(shape));
                built.push(self.split_outputs(layer, std::slice::from_ref(&range), false));
                if is_head {
                    self.classes = Some(ClassShard { axis: self.tensor_split.axis, ranks, own: range });
                }
            }
            (Some(size), Features, Replicated) => {
                self.split_inputs(layer, &self.local_range(size.input), shape, built);
            }
            (_, Features, _) => {
                let range = self.local_range(shape.last());
                let elements =
                    DropoutIndices::Runs { first: range.start, run: range.len(), of: shape.last() };
                built.push(entry.counting(elements).unwrap_or_else(|| layer.clone()));
            }
            (_, Samples, _) => {
                if let Some(channels) = entry.properties().batch_statistics {
                    built.push(norms::shared_by_samples(channels, self.tensor_split.axis));
                }
                self.hold_full(layer, true);
                let elements = DropoutIndices::Samples { ranks, rank };
                built.push(entry.counting(elements).unwrap_or_else(|| layer.clone()));
            }
            _ => built.push(layer.clone()),
        }
    }

    /// An activation on its way from one split to another.
    fn moved(&self, from: ActivationSplit, to: ActivationSplit, shape: Shape) -> Option<LayerSpec> {
        let op = |from, to| match (from, to) {
            (Samples, Replicated) => CollectiveOp::AllGather(ShardDim::Samples),
            (Replicated, Samples) => CollectiveOp::Slice(ShardDim::Samples),
            (Features, Replicated) => CollectiveOp::AllGather(ShardDim::Last),
            (Replicated, Features) => CollectiveOp::Slice(ShardDim::Last),
            (Samples, Features) => CollectiveOp::AllToAll { from: ShardDim::Samples, to: ShardDim::Last },
            (Features, Samples) => CollectiveOp::AllToAll { from: ShardDim::Last, to: ShardDim::Samples },
            (from, to) => unreachable!("no route goes from {from:?} to {to:?} between two layers"),
        };
        // Nobody wants the gradient of what no layer has trained.
        let backward = || if self.trained { op(to, from) } else { CollectiveOp::Identity };
        (from != to).then(|| self.collective(op(from, to), backward(), shape.last()))
    }
}
