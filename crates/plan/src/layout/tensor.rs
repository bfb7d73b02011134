//! Tensor parallelism (Shoeybi et al. 2019): linear layers split by their outputs, then by their inputs, so
//! that between the two nothing is sent.
//!
//! | layers of the model | what a rank runs |
//! |---|---|
//! | linear, activations or attention, linear | `enter`, its columns, its channels or heads, its rows, `leave`, bias |
//! | the head | `enter`, its classes; the loss takes a maximum and a sum over ranks |
//! | an embedding | its rows, zeros for other ids, `leave` |
//! | another linear layer, or any that is to be plain; a convolution | `enter`, its outputs, an all-gather of them |
//! | norms, positions, dropout, all else | the same on every rank |
//!
//! `enter` is the identity forward and an all-reduce backward, `leave` an all-reduce forward and the identity
//! backward (Megatron's f and g). Where nothing before a layer is trained nobody wants that gradient, and
//! there is no `enter`. With sequence-parallel norms (Korthikanti et al. 2022) what lies between `leave` and
//! `enter` is split along the sequence: `enter` all-gathers it, `leave` reduce-scatters it, and ranks have
//! partial sums of the gradients of what is there. A layer too small to be split runs in full on every rank.

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
use crate::spec::{DropoutIndices, LayerSpec, ModelSpec, Parameter, Shape, TensorRole};
use crate::split::split;

/// What one of several ranks along the tensor axis has.
pub(super) struct ShardedModel {
    pub model: ModelSpec,
    pub parameters: Vec<Parameter>,
    /// Of each parameter its shard, and whether ranks with the same shard have partial sums of its gradient.
    pub shards: Vec<(Shard, bool)>,
    pub classes: Option<ClassShard>,
}

/// Which of the ranks along an axis one is, and how they split the model.
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorSplit<'a> {
    pub axis: Axis,
    pub ranks: usize,
    pub rank: usize,
    /// Whether what lies between layers that are split is split along the sequence.
    pub sequence: bool,
    /// How linear layers follow each other.
    pub linear: &'a LinearForm,
}

/// The model of one rank.
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
    let shards = parameters.iter().zip(full).map(|(param, full)| {
        debug_assert_eq!(
            param.name, full.name,
            "a rank's model has the parameters of the whole, in their order"
        );
        let everything = || ParamShard { shard: Shard::full(&full.shape), is_partial: false };
        let ParamShard { shard, is_partial } = sharder.shards.remove(&param.name).unwrap_or_else(everything);
        debug_assert_eq!(shard.shape(), param.shape, "{}", param.name);
        (shard, is_partial)
    });
    let shards = shards.collect();
    ShardedModel { model: local, parameters, shards, classes: sharder.classes }
}

/// Makes the layers of one rank.
struct TensorSharder<'a> {
    tensor_split: TensorSplit<'a>,
    /// Whether a layer before the point reached is trained: what comes behind it has a gradient.
    trained: bool,
    /// What the rank holds of a parameter, by name; of the others it is all, and its gradient the same on
    /// every rank.
    shards: HashMap<String, ParamShard>,
    classes: Option<ClassShard>,
}

impl TensorSharder<'_> {
    fn new(tensor_split: TensorSplit<'_>) -> TensorSharder<'_> {
        TensorSharder { tensor_split, trained: false, shards: HashMap::new(), classes: None }
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
                built.push(self.split_outputs(next, &[self.local_range(outputs)], false));
                built.push(self.gather_features(outputs));
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

    /// Each branch by itself: what one of them trains is not before the others.
    fn split_branches(&mut self, layer: &LayerSpec, shape: Shape) -> Result<LayerSpec, Error> {
        let before = self.trained;
        layer.map_branches(|branch| {
            self.trained = before;
            self.layers(branch, shape, false)
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
            built.push(self.split_branches(layer, shape)?);
        } else if let Some(outputs) =
            self.outputs_to_split(layer).filter(|_| is_head || !self.splits_sequence(shape))
        {
            let range = self.local_range(outputs);
            built.extend(self.enter(shape));
            built.push(self.split_outputs(layer, std::slice::from_ref(&range), false));
            match is_head {
                true => {
                    self.classes = Some(ClassShard {
                        axis: self.tensor_split.axis,
                        ranks: self.tensor_split.ranks,
                        own: range,
                    })
                }
                false => built.push(self.gather_features(outputs)),
            }
        } else if is_head {
            built.extend(self.gathered(shape));
            built.push(layer.clone());
        } else if entry.properties().tensor_role == TensorRole::RowParallel {
            self.run_closing(layer, shape, built);
        } else if entry.properties().mixes_positions && self.splits_sequence(shape) {
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
            return self.split_inputs(layer, &self.local_range(inputs), shape, built);
        }
        let after = layer.output(shape).expect("the shapes were checked");
        built.push(layer.clone());
        built.extend(self.splits_sequence(after).then(|| self.sliced(after)));
    }

    /// A layer that every rank runs, on its slice of the sequence where that is split.
    fn on_positions(&mut self, layer: &LayerSpec, shape: Shape) -> LayerSpec {
        let (Shape::Sequence { seq, width }, true) = (shape, self.splits_sequence(shape)) else {
            return layer.clone();
        };
        // Each rank has other positions: its gradients are partial sums.
        self.hold_full(layer, true);
        let range = self.local_range(seq);
        let elements =
            DropoutIndices::Runs { first: range.start * width, run: range.len() * width, of: seq * width };
        let entry = layer.description();
        entry.at_position(range.start).or_else(|| entry.counting(elements)).unwrap_or_else(|| layer.clone())
    }

    /// Which of so many are this rank's: as many as every other's, but for one more on some.
    fn local_range(&self, size: usize) -> Range<usize> {
        split(size, self.tensor_split.ranks, self.tensor_split.rank)
    }

    fn conflict(&self, problem: String) -> Error {
        Error::conflict("parallel.tensor", format!("is {}, {problem}", self.tensor_split.ranks))
    }
}

#[cfg(test)]
mod tests;
