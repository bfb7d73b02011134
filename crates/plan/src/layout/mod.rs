//! How the tensors of a model lie on the mesh: each rank's local model, made of the full one.
//!
//! A rank's model is a spec like any other, of the sizes that the rank has, with collectives as layers of
//! their own. Its parameters are as many as the full model's, in the same order and of the same names; a
//! [`Shard`] says where each lies in the full one. All that counts, builds, saves or masks reads that model,
//! so an axis that shards tensors is known here alone.

mod integrated;
mod linear_form;
mod norms;
pub mod spatial;
mod tensor;

use std::collections::HashSet;
use std::ops::Range;

pub use integrated::{Mixing, Mixture};
pub use linear_form::LinearForm;

use crate::cost::Integrated;
use crate::error::Error;
use crate::mesh::{Axis, PerAxis};
use crate::shard::Shard;
use crate::spec::{Input, LayerSpec, ModelSpec, Parameter, Shape};
use crate::tiles::Region;

/// The models of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// By tile of the image, and of each by the coordinate along the tensor axis.
    locals: Vec<LocalModel>,
    /// Ranks along the tensor axis.
    tensor: usize,
    /// Whether these cut what lies between their layers along the sequence.
    sequence: bool,
    /// Rows and columns of the grid of ranks over which images are split.
    grid: [usize; 2],
    /// How the layers are split, where each is in the way that suits it.
    mixture: Option<Integrated>,
}

/// One rank's own model.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalModel {
    /// The layers, with the sizes that the rank has, and the collectives between them.
    pub model: ModelSpec,
    /// Its parameters, of the shapes that the rank has.
    pub parameters: Vec<Parameter>,
    /// Of each parameter, what the rank holds.
    pub shards: Vec<Shard>,
    /// Of each parameter, along which axes those who hold the same shard have a partial sum of its gradient
    /// each. Along others they have the same gradient.
    pub partial: Vec<PartialAxes>,
    /// The classes whose logits the rank makes, where that is not all.
    pub classes: Option<ClassShard>,
}

/// Some of the classes that ranks along an axis split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassShard {
    /// Whose others the other ranks have,
    pub axis: Axis,
    /// so many with this one.
    pub ranks: usize,
    pub own: Range<usize>,
}

/// Axes along which ranks have partial sums of a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartialAxes {
    /// Each sees other positions, or other heads.
    pub tensor: bool,
    /// Each sees other pixels.
    pub spatial: bool,
}

impl LocalModel {
    /// That of a rank which has all of the model.
    pub fn unsharded(model: &ModelSpec) -> LocalModel {
        LocalModel::uncut(model, model.parameters())
    }

    fn uncut(model: &ModelSpec, parameters: Vec<Parameter>) -> LocalModel {
        let shards: Vec<Shard> = parameters.iter().map(|parameter| Shard::full(&parameter.shape)).collect();
        let partial = vec![PartialAxes::default(); shards.len()];
        LocalModel { model: model.clone(), parameters, shards, partial, classes: None }
    }

    /// That of a rank among those along an axis.
    fn of(shard: tensor::ShardedModel, axis: Axis) -> LocalModel {
        let tensor::ShardedModel { model, parameters, shards, classes } = shard;
        let along = |is_partial: bool| PartialAxes {
            tensor: is_partial && axis == Axis::Tensor,
            spatial: is_partial && axis == Axis::Spatial,
        };
        let (shards, partial) =
            shards.into_iter().map(|(shard, is_partial)| (shard, along(is_partial))).unzip();
        LocalModel { model, parameters, shards, partial, classes }
    }

    /// The tile of every image that the rank holds, where images are cut.
    pub fn tile(&self) -> Option<Region> {
        let mut tile = None;
        self.model.for_each(&mut |layer| {
            if let LayerSpec::Crop(crop) = layer {
                tile = Some(crop.region.clone());
            }
        });
        tile
    }

    /// Weights of each parameter that a rank keeps where so many of the full one stay: its even fraction, since
    /// only the run knows where they lie.
    pub(crate) fn kept(&self, mut full: Vec<Option<u64>>) -> Vec<Option<u64>> {
        for (kept, shard) in full.iter_mut().zip(&self.shards).filter(|(_, shard)| !shard.is_full()) {
            let fraction = shard.len() as f64 / shard.full_shape().iter().product::<usize>() as f64;
            *kept = kept.map(|kept| (kept as f64 * fraction).round() as u64);
        }
        full
    }
}

/// How tensors are cut along the axes that cut them.
#[derive(Debug, Clone, PartialEq)]
pub struct Partition {
    /// Ranks that have a shard of every large layer,
    pub tensor: usize,
    /// whether these cut what lies between along the sequence,
    pub sequence: bool,
    /// and how linear layers follow each other on them.
    pub linear: LinearForm,
    /// Rows and columns of the grid of ranks over which images are split.
    pub grid: [usize; 2],
    /// Whether batch norms measure over the samples of all replicas.
    pub synchronised: bool,
    /// Whether the ranks of one of these axes split each layer in the way that suits it.
    pub integrated: Option<Mixing>,
}

impl Partition {
    /// Nothing is cut.
    pub const NONE: Partition = Partition {
        tensor: 1,
        sequence: false,
        linear: LinearForm::Paired,
        grid: [1, 1],
        synchronised: false,
        integrated: None,
    };
}

impl Layout {
    /// That of a model of these parameters whose shapes were checked.
    pub fn new(model: &ModelSpec, parameters: &[Parameter], cuts: Partition) -> Result<Layout, Error> {
        let Partition { tensor, sequence, linear, grid, synchronised, integrated } = cuts;
        match model.input {
            Input::Image { .. } if sequence => {
                let why = format!("with `model.name` = \"{}\", which reads no sequence", model.name);
                return Err(Error::no_effect("parallel.sequence", why));
            }
            Input::Tokens { seq, .. } if sequence && seq < tensor => {
                let problem = format!(
                    "is {tensor}, but a sequence of {seq} positions cannot be split into so many shards"
                );
                return Err(Error::conflict("parallel.tensor", problem));
            }
            _ => {}
        }
        if let Some(name) = linear.unknown(model) {
            let expected = "of linear layers' names in the model, or what such names begin with";
            return Err(Error::value("parallel.linear", expected, format!("\"{name}\"")));
        }
        let tiles = grid[0] * grid[1];
        let (axis, group) = if tiles > 1 { (Axis::Spatial, tiles) } else { (Axis::Tensor, tensor) };
        let mixture = integrated.map(|mixing| mixing.find(model, axis, group)).transpose()?;
        let mut locals = Vec::with_capacity(tiles * tensor);
        for peer in 0..tiles * tensor {
            let (tile, rank) = (peer / tensor, peer % tensor);
            let tensor_split =
                tensor::TensorSplit { axis: Axis::Tensor, ranks: tensor, rank, sequence, linear: &linear };
            let mut local = match &mixture {
                Some(mixture) => {
                    let mixture_split =
                        tensor::TensorSplit { axis, ranks: group, rank: peer, ..tensor_split };
                    LocalModel::of(tensor::follow(model, parameters, mixture_split, &mixture.route), axis)
                }
                None => LocalModel::uncut(model, parameters.to_vec()),
            };
            if synchronised {
                local.model = norms::over_replicas(&local.model);
            }
            let mut summed = HashSet::new();
            if tiles > 1 {
                (local.model, summed) = spatial::shard(&local.model, grid, tile)?;
            }
            if tensor > 1 && mixture.is_none() {
                local = LocalModel::of(tensor::shard(&local.model, parameters, tensor_split)?, Axis::Tensor);
            }
            for (partial, parameter) in local.partial.iter_mut().zip(parameters) {
                partial.spatial |= summed.contains(&parameter.name);
            }
            locals.push(local);
        }
        Ok(Layout { locals, tensor, sequence, grid, mixture })
    }

    /// Whether what lies between split layers is split along the sequence.
    pub fn has_sequence(&self) -> bool {
        self.sequence
    }

    /// Rows and columns of the grid of ranks over which images are split.
    pub fn grid(&self) -> [usize; 2] {
        self.grid
    }

    /// How the layers are split, where each is in the way that suits it.
    pub fn mixture(&self) -> Option<&Integrated> {
        self.mixture.as_ref()
    }

    /// The model of the rank at some coordinates.
    pub fn of(&self, coords: PerAxis) -> &LocalModel {
        &self.locals[self.model_parallel_rank(coords)]
    }

    /// Which of those of the same model-parallel group a rank is.
    pub fn model_parallel_rank(&self, coords: PerAxis) -> usize {
        coords.spatial * self.tensor + coords.tensor
    }

    /// The models of those of the same model-parallel group, in the order of ranks.
    pub fn local_models(&self) -> &[LocalModel] {
        &self.locals
    }

    /// Whether two of these have partial sums of a parameter's gradient, which are all-reduced.
    pub fn are_reduced(&self, parameter: usize, a: usize, b: usize) -> bool {
        let (one, other) = (&self.locals[a], &self.locals[b]);
        let PartialAxes { tensor, spatial } = one.partial[parameter];
        one.shards[parameter] == other.shards[parameter]
            && (tensor || a % self.tensor == b % self.tensor)
            && (spatial || a / self.tensor == b / self.tensor)
    }

    /// How many of these have a partial sum of the gradient that one of them has of a parameter, itself included.
    pub(crate) fn partial_ranks(&self, parameter: usize, of: usize) -> usize {
        (0..self.locals.len()).filter(|peer| *peer == of || self.are_reduced(parameter, of, *peer)).count()
    }
}

fn through(layers: &[LayerSpec], shape: Shape) -> Shape {
    layers.iter().fold(shape, |shape, layer| layer.output(shape).expect("the shapes were checked"))
}
