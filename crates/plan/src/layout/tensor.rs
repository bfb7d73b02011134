//! Tensor parallelism (Shoeybi et al. 2019): linear layers cut by their outputs, then by their inputs, so
//! that between the two nothing is sent.
//!
//! | layers of the model | what a rank runs |
//! |---|---|
//! | linear, activations or attention, linear | `enter`, its columns, its channels or heads, its rows, `leave`, bias |
//! | the head | `enter`, its classes; the loss takes a maximum and a sum over ranks |
//! | an embedding | its rows, zeros for other ids, `leave` |
//! | another linear layer, or any that is to be plain; a convolution | `enter`, its outputs, a gather of them |
//! | norms, positions, dropout, all else | the same on every rank |
//!
//! `enter` is nothing forward and a sum backward, `leave` a sum forward and nothing backward. Where nothing
//! before a layer is trained nobody wants that gradient, and there is no `enter`. With sequence-parallel
//! norms (Korthikanti et al. 2022) what lies between `leave` and `enter` is cut along the sequence: `enter`
//! gathers it and `leave` sums and cuts, and gradients of what is there are sums over ranks. A layer too
//! small to be cut runs whole on every rank.

mod collectives;
mod pair;
mod param_shards;
mod route;

use std::collections::HashMap;
use std::ops::Range;

use self::param_shards::ParamShard;
pub(super) use self::route::follow;
use super::{ClassShard, LinearForm, Shard, through};
use crate::error::Error;
use crate::mesh::Axis;
use crate::spec::{
    CollectiveOp, DropoutIndices, LayerSpec, ModelSpec, Parameter, Shape, ShardDim, TensorRole,
};
use crate::split::split;

/// What one of several ranks along the tensor axis has.
pub(super) struct ShardedModel {
    pub model: ModelSpec,
    pub parameters: Vec<Parameter>,
    /// Of each parameter its shard, and whether all who have the same have a partial sum of its gradient.
    pub held: Vec<(Shard, bool)>,
    pub classes: Option<ClassShard>,
}

/// Which of the ranks along an axis one is, and how they cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorSplit<'a> {
    pub axis: Axis,
    pub ranks: usize,
    pub rank: usize,
    /// Whether what lies between layers that are cut is cut along the sequence.
    pub sequence: bool,
    /// How linear layers follow each other.
    pub linear: &'a LinearForm,
}

/// That of a rank.
pub(super) fn shard(
    model: &ModelSpec,
    full: &[Parameter],
    tensor_split: TensorSplit<'_>,
) -> Result<ShardedModel, Error> {
    let mut sharder = TensorSharder::new(tensor_split);
    let (mut local, mut shape) = (model.clone(), model.input.shape());
    let last = model.blocks.len() - 1;
    for (i, block) in model.blocks.iter().enumerate() {
        local.blocks[i].layers = sharder.layers(&block.layers, shape, i == last)?;
        shape = through(&block.layers, shape);
    }
    Ok(finish(sharder, local, full))
}

/// What a rank has whose layers were made.
fn finish(mut sharder: TensorSharder<'_>, local: ModelSpec, full: &[Parameter]) -> ShardedModel {
    let parameters = local.parameters();
    let held = parameters.iter().zip(full).map(|(own, full)| {
        debug_assert_eq!(
            own.name, full.name,
            "a rank's model has the parameters of the whole, in their order"
        );
        let everything = || ParamShard { shard: Shard::full(&full.shape), is_partial: false };
        let ParamShard { shard, is_partial } = sharder.held.remove(&own.name).unwrap_or_else(everything);
        debug_assert_eq!(shard.shape(), own.shape, "{}", own.name);
        (shard, is_partial)
    });
    let held = held.collect();
    ShardedModel { model: local, parameters, held, classes: sharder.classes }
}

/// Makes the layers of one rank.
struct TensorSharder<'a> {
    tensor_split: TensorSplit<'a>,
    /// Whether a layer before the place reached is trained: what comes behind it has a gradient.
    trained: bool,
    /// What the rank holds of a parameter, by name; of the others it is all, and its gradient the same on
    /// every rank.
    held: HashMap<String, ParamShard>,
    classes: Option<ClassShard>,
}

impl TensorSharder<'_> {
    fn new(tensor_split: TensorSplit<'_>) -> TensorSharder<'_> {
        TensorSharder { tensor_split, trained: false, held: HashMap::new(), classes: None }
    }

    /// The layers of a rank for a row of layers that begins and ends with what every rank has.
    fn layers(
        &mut self,
        layers: &[LayerSpec],
        mut shape: Shape,
        ends: bool,
    ) -> Result<Vec<LayerSpec>, Error> {
        let (mut built, mut rest) = (Vec::new(), layers);
        while let Some(layer) = rest.first() {
            let is_head = ends && rest.len() == 1;
            let taken = if let [halo @ LayerSpec::Halo(_), next, ..] = rest
                && next.properties().hides_halo
                && let Some(outputs) = self.outputs_to_split(next)
            {
                // What comes from neighbours stays beside the convolution, which goes on meanwhile.
                built.extend(self.enter(shape));
                built.push(halo.clone());
                built.push(self.split_outputs(next, &[self.own(outputs)], false));
                built.push(self.exchange(
                    CollectiveOp::AllGather(ShardDim::Last),
                    CollectiveOp::Slice(ShardDim::Last),
                    outputs,
                ));
                2
            } else if let Some(pair) = self.pair(rest, shape, ends)? {
                self.run_pair(&pair, &rest[..=pair.end], shape, &mut built)?;
                pair.end + 1
            } else {
                self.run_one(layer, shape, is_head, &mut built)?;
                1
            };
            shape = through(&rest[..taken], shape);
            self.trained |= rest[..taken].iter().any(|layer| !layer.parameters().is_empty());
            rest = &rest[taken..];
        }
        Ok(built)
    }

    /// Ways that part here: what one of them trains is not before the others.
    fn ways(&mut self, layer: &LayerSpec, shape: Shape) -> Result<LayerSpec, Error> {
        let before = self.trained;
        layer.map_branches(|way| {
            self.trained = before;
            self.layers(way, shape, false)
        })
    }

    fn run_one(
        &mut self,
        layer: &LayerSpec,
        shape: Shape,
        is_head: bool,
        built: &mut Vec<LayerSpec>,
    ) -> Result<(), Error> {
        let entry = layer.description();
        let is_head =
            is_head && !self.tensor_split.linear.is_plain(layer) && entry.properties().tensor_role.opens();
        if entry.branches().is_some() {
            built.push(self.ways(layer, shape)?);
        } else if let Some(outputs) = self.outputs_to_split(layer).filter(|_| is_head || !self.cuts(shape)) {
            let own = self.own(outputs);
            built.extend(self.enter(shape));
            built.push(self.split_outputs(layer, std::slice::from_ref(&own), false));
            match is_head {
                true => {
                    self.classes =
                        Some(ClassShard { axis: self.tensor_split.axis, ranks: self.tensor_split.ranks, own })
                }
                false => built.push(self.exchange(
                    CollectiveOp::AllGather(ShardDim::Last),
                    CollectiveOp::Slice(ShardDim::Last),
                    outputs,
                )),
            }
        } else if is_head {
            built.extend(self.gathered(shape));
            built.push(layer.clone());
        } else if entry.properties().tensor_role == TensorRole::RowParallel {
            self.run_closing(layer, shape, built);
        } else if entry.properties().mixes_positions && self.cuts(shape) {
            built.extend(self.gathered(shape));
            built.push(layer.clone());
            built.push(self.sliced(shape));
        } else {
            built.push(self.on_positions(layer, shape));
        }
        Ok(())
    }

    /// How many outputs a layer has that ranks can have some of each.
    fn outputs_to_split(&self, layer: &LayerSpec) -> Option<usize> {
        let size = layer.properties().product_size.filter(|_| layer.properties().tensor_role.opens())?;
        (size.output >= self.tensor_split.ranks).then_some(size.output)
    }

    /// A layer of which ranks have some inputs each, where there are enough of them.
    fn run_closing(&mut self, layer: &LayerSpec, shape: Shape, built: &mut Vec<LayerSpec>) {
        let inputs = layer.properties().product_size.expect("a layer that closes multiplies").input;
        if inputs >= self.tensor_split.ranks {
            return self.split_inputs(layer, &self.own(inputs), shape, built);
        }
        let after = layer.output(shape).expect("the shapes were checked");
        built.push(layer.clone());
        built.extend(self.cuts(after).then(|| self.sliced(after)));
    }

    /// A layer that every rank runs, on its part of the sequence where that is cut.
    fn on_positions(&mut self, layer: &LayerSpec, shape: Shape) -> LayerSpec {
        let (Shape::Sequence { seq, width }, true) = (shape, self.cuts(shape)) else { return layer.clone() };
        self.hold_layer_full(layer);
        let own = self.own(seq);
        let elements =
            DropoutIndices::Runs { first: own.start * width, run: own.len() * width, of: seq * width };
        let entry = layer.description();
        entry.at_position(own.start).or_else(|| entry.counting(elements)).unwrap_or_else(|| layer.clone())
    }

    /// Which of so many a rank has: equal parts, but for one more in some.
    fn own(&self, extent: usize) -> Range<usize> {
        split(extent, self.tensor_split.ranks, self.tensor_split.rank)
    }

    fn conflict(&self, problem: String) -> Error {
        Error::Conflict {
            field: "parallel.tensor".into(),
            problem: format!("is {}, {problem}", self.tensor_split.ranks),
        }
    }
}

#[cfg(test)]
mod tests;
