//! What a layer is, one file each: its fields, its shape rule, its parameters, its flops, what it keeps for
//! the backward pass, and how a run file writes it.
//!
//! A layer is a struct that implements [`LayerDescription`]; whatever it leaves out has a default that holds
//! for most. All that walks through a model (shapes, counts, activation bytes, channels) asks the entry; all
//! that times, splits, recomputes or prunes it asks its [`Properties`]. What a run file may write is a
//! [`LayerKind`]: its word and its fields with their defaults, from which the reader, its hints and the check
//! of docs/run-file.md are made. To add a layer, write its file, a variant of [`LayerSpec`] with its line in
//! `entry`, and, where a run file may name it, its line in [`KINDS`].

mod activation;
mod attention;
mod bias;
mod branches;
mod collective;
mod conv;
mod dropout;
mod embedding;
mod kind;
mod linear;
mod norm;
mod pool;
mod properties;
mod reshape;
mod rotary;
mod tiles;
mod walk;

pub use crate::tiles::WindowPadding;
pub use activation::Activation;
pub use attention::{Attention, QkNorm};
pub use bias::Bias;
pub use branches::{BranchJoin, BranchList, Branches, JointProjection, LayerBranch, Residual};
pub use collective::{CollectiveLayer, CollectiveOp, ShardDim, SharedStatistics};
pub use conv::Conv;
pub use dropout::{Dropout, DropoutIndices};
pub use embedding::{Embedding, PositionEmbedding};
pub use kind::{Downstream, LayerContext, LayerKind, WrittenLayer, active};
pub use linear::{Linear, TiedLinear, WeightOrder};
pub use norm::{BatchNorm, LayerNorm, NORM_EPS, RmsNorm};
pub use pool::{AdaptiveAvgPool, AvgPool, GlobalAvgPool, MaxPool};
pub use properties::{
    AttentionRole, GradientReads, HeadShard, LayerKernel, LayerShard, MemoryPass, ProductSize, Properties,
    TensorRole, TileRole,
};
pub use reshape::{FeatureSlice, Flatten, PadChannels};
pub use rotary::{Llama3Scaling, Rotary};
pub use tiles::{Crop, Halo, TiledMean};

use std::ops::Range;

use serde::Serialize;

use super::parameter::{BufferSpec, Parameter};
use super::shape::Shape;

/// Every kind of layer that a run file can name, in the order in which a person reads them.
pub const KINDS: &[&LayerKind] = &[
    &linear::LINEAR,
    &conv::CONV,
    &pool::MAX_POOL,
    &pool::AVG_POOL,
    &pool::GLOBAL_AVG_POOL,
    &pool::ADAPTIVE_AVG_POOL,
    &reshape::FLATTEN,
    &reshape::PAD_CHANNELS,
    &norm::BATCH_NORM,
    &norm::LAYER_NORM,
    &norm::RMS_NORM,
    &activation::RELU,
    &activation::GELU,
    &activation::SILU,
    &activation::GELU_ERF,
    &activation::TANH,
    &dropout::DROPOUT,
    &embedding::EMBEDDING,
    &embedding::POSITION,
    &attention::ATTENTION,
    &branches::RESIDUAL,
    &branches::BRANCHES,
];

/// A layer of a model, or what ranks do between two layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum LayerSpec {
    /// `y = x W + b` over the last dimension.
    Linear(Linear),
    /// A linear layer whose weight belongs to another layer (a tied output head).
    TiedLinear(TiedLinear),
    /// Convolution over height and width.
    Conv(Conv),
    /// The largest of each window.
    MaxPool(MaxPool),
    /// The mean of each window.
    AvgPool(AvgPool),
    /// The mean over all positions: `[h, w, c]` becomes `[c]`.
    GlobalAvgPool,
    /// Average pool to exactly `size` x `size` (the heads of VGG and AlexNet).
    AdaptiveAvgPool(AdaptiveAvgPool),
    /// `[h, w, c]` becomes `[c h w]`, in the order in which PyTorch flattens, so that the next weight fits.
    Flatten,
    /// Adds zero channels at the end (the shortcut of resnet8).
    PadChannels(PadChannels),
    /// Batch norm over all but the channels, with running statistics.
    BatchNorm(BatchNorm),
    /// Layer norm over the last dimension.
    LayerNorm(LayerNorm),
    /// RMS norm over the last dimension.
    RmsNorm(RmsNorm),
    /// A function of each element.
    Activation(Activation),
    /// Zeroes elements at random while training.
    Dropout(Dropout),
    /// Token ids to vectors.
    Embedding(Embedding),
    /// Adds a learnt vector for each position.
    PositionEmbedding(PositionEmbedding),
    /// Causal attention proper, over queries, keys and values side by side.
    Attention(Attention),
    /// `y = branch(x) + shortcut(x)`.
    Residual(Residual),
    /// Several branches that are added, multiplied or concatenated.
    Branches(Branches),
    /// What ranks do with a tensor between two layers.
    #[serde(rename = "Exchange")]
    Collective(CollectiveLayer),
    /// Some features of its input.
    #[serde(rename = "Columns")]
    FeatureSlice(FeatureSlice),
    /// An all-reduce of what the batch norm behind it measures.
    SharedStatistics(SharedStatistics),
    /// A learnt vector that is added to every row.
    Bias(Bias),
    /// The tile of a rank out of a whole image.
    Crop(Crop),
    /// A tile with what windows see of its neighbours.
    Halo(Halo),
    /// The mean over an image which is cut.
    TiledMean(TiledMean),
}

/// What a layer says of itself. Flops, parameters and what is kept are its own, without those of the layers
/// inside it.
pub trait LayerDescription {
    /// The shape that comes out when `input` goes in, or what is wrong.
    fn output(&self, input: Shape) -> Result<Shape, String>;

    /// The prefix of its parameters' names, where it has parameters.
    fn name(&self) -> Option<&str> {
        None
    }

    /// In the order of a checkpoint. A tied weight belongs to the layer it is tied to.
    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// The full name of a weight of another layer that it uses.
    fn tied_weight(&self) -> Option<&str> {
        None
    }

    /// Kept and saved but not trained.
    fn buffers(&self) -> Vec<BufferSpec> {
        Vec::new()
    }

    /// Of the forward pass for one sample: two for each multiply-add of its products.
    fn flops(&self, _input: Shape, _output: Shape) -> f64 {
        0.0
    }

    /// What the backward pass needs of a micro-batch of `samples`.
    fn saves(&self, _input: Shape, _samples: u64) -> SavedForBackward {
        SavedForBackward::default()
    }

    /// Its branches, where it has layers inside.
    fn branches(&self) -> Option<BranchList<'_>> {
        None
    }

    /// Some of its outputs, where it opens.
    fn split_outputs(&self, _ranges: &[Range<usize>]) -> Option<LayerShard> {
        None
    }

    /// Some of its inputs, where it closes.
    fn split_inputs(&self, _range: &Range<usize>) -> Option<LayerShard> {
        None
    }

    /// The heads of one of several ranks, where it has heads, or why there are too few.
    fn split_heads(&self, _ranks: usize, _rank: usize) -> Option<Result<HeadShard, String>> {
        None
    }

    /// The layer for a rank whose slice of a sequence begins at a position, where it wants to know.
    fn at_position(&self, _first: usize) -> Option<LayerSpec> {
        None
    }

    /// The layer for a rank that has these elements of a tensor, where it draws random numbers for each.
    fn counting(&self, _elements: DropoutIndices) -> Option<LayerSpec> {
        None
    }

    /// A layer of windows with another padding: a tile has none towards its neighbours.
    fn padded(&self, _padding: WindowPadding) -> Option<LayerSpec> {
        None
    }

    /// What it is to those who time it, split it over ranks, run it again or prune it.
    fn properties(&self) -> Properties {
        Properties::PLAIN
    }
}

/// What one layer wants from the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SavedForBackward {
    /// Whether its input is kept.
    pub input: bool,
    /// Whether its output is kept.
    pub output: bool,
    /// Bytes beside them, of the whole micro-batch: statistics, places of maxima.
    pub bytes: u64,
}

impl SavedForBackward {
    /// Its input alone.
    pub(crate) const INPUT: SavedForBackward = SavedForBackward { input: true, output: false, bytes: 0 };
    /// Its output alone.
    pub(crate) const OUTPUT: SavedForBackward = SavedForBackward { input: false, output: true, bytes: 0 };
}

impl LayerSpec {
    /// The word for this kind of layer in run files and messages, and the file that knows it.
    fn entry(&self) -> (&'static str, &dyn LayerDescription) {
        match self {
            LayerSpec::Linear(layer) => (linear::LINEAR.word, layer),
            LayerSpec::TiedLinear(layer) => ("tied_linear", layer),
            LayerSpec::Conv(layer) => (conv::CONV.word, layer),
            LayerSpec::MaxPool(layer) => (pool::MAX_POOL.word, layer),
            LayerSpec::AvgPool(layer) => (pool::AVG_POOL.word, layer),
            LayerSpec::GlobalAvgPool => (pool::GLOBAL_AVG_POOL.word, &GlobalAvgPool),
            LayerSpec::AdaptiveAvgPool(layer) => (pool::ADAPTIVE_AVG_POOL.word, layer),
            LayerSpec::Flatten => (reshape::FLATTEN.word, &Flatten),
            LayerSpec::PadChannels(layer) => (reshape::PAD_CHANNELS.word, layer),
            LayerSpec::BatchNorm(layer) => (norm::BATCH_NORM.word, layer),
            LayerSpec::LayerNorm(layer) => (norm::LAYER_NORM.word, layer),
            LayerSpec::RmsNorm(layer) => (norm::RMS_NORM.word, layer),
            LayerSpec::Activation(layer) => (layer.word(), layer),
            LayerSpec::Dropout(layer) => (dropout::DROPOUT.word, layer),
            LayerSpec::Embedding(layer) => (embedding::EMBEDDING.word, layer),
            LayerSpec::PositionEmbedding(layer) => (embedding::POSITION.word, layer),
            LayerSpec::Attention(layer) => (attention::ATTENTION.word, layer),
            LayerSpec::Residual(layer) => (branches::RESIDUAL.word, layer),
            LayerSpec::Branches(layer) => (branches::BRANCHES.word, layer),
            LayerSpec::Collective(layer) => ("exchange", layer),
            LayerSpec::FeatureSlice(layer) => ("columns", layer),
            LayerSpec::SharedStatistics(layer) => ("shared_statistics", layer),
            LayerSpec::Bias(layer) => ("bias", layer),
            LayerSpec::Crop(layer) => ("crop", layer),
            LayerSpec::Halo(layer) => ("halo", layer),
            LayerSpec::TiledMean(layer) => ("tiled_mean", layer),
        }
    }

    /// The file that knows it.
    pub fn description(&self) -> &dyn LayerDescription {
        self.entry().1
    }

    /// What it is to those who time it, split it over ranks, run it again or prune it.
    pub fn properties(&self) -> Properties {
        self.description().properties()
    }

    /// The word for this kind of layer in run files and messages.
    pub fn kind(&self) -> &'static str {
        self.entry().0
    }

    /// The prefix of its parameters' names, where it has parameters of its own.
    pub fn name(&self) -> Option<&str> {
        self.description().name()
    }

    /// The shape that comes out when `input` goes in, or what is wrong.
    pub fn output(&self, input: Shape) -> Result<Shape, String> {
        let output = self.description().output(input)?;
        if output.is_empty() {
            return Err(format!("every dimension must be at least 1, and it gives {output}"));
        }
        Ok(output)
    }

    /// How many samples of a micro-batch of `all` a rank has behind it, of the `now` that it has before.
    pub(crate) fn samples_behind(&self, now: u64, all: u64) -> u64 {
        match self {
            LayerSpec::Collective(collective) => collective.samples_behind(now, all),
            _ => now,
        }
    }

    /// Its own parameters, without those of the layers inside it; a tied weight belongs to the layer it is
    /// tied to.
    pub fn parameters(&self) -> Vec<Parameter> {
        #[cfg(test)]
        listings::LISTINGS.with(|listings| listings.set(listings.get() + 1));
        self.description().parameters()
    }

    /// Its own buffers, without those of the layers inside it.
    pub fn buffers(&self) -> Vec<BufferSpec> {
        self.description().buffers()
    }

    /// Calls `visit` for this layer and those inside it, in the order of execution.
    pub fn for_each<'a>(&'a self, visit: &mut dyn FnMut(&'a LayerSpec)) {
        visit(self);
        for inner in self.description().branches().into_iter().flat_map(|list| list.all) {
            inner.layers.iter().for_each(|layer| layer.for_each(visit));
        }
    }

    /// The layer with what `inner` makes of each row of layers inside it; the same where it has none.
    pub(crate) fn map_branches<E>(
        &self,
        mut inner: impl FnMut(&[LayerSpec]) -> Result<Vec<LayerSpec>, E>,
    ) -> Result<LayerSpec, E> {
        Ok(match self {
            LayerSpec::Residual(Residual { branch, shortcut }) => {
                LayerSpec::Residual(Residual { branch: inner(branch)?, shortcut: inner(shortcut)? })
            }
            LayerSpec::Branches(Branches { join, branches }) => {
                let branches = branches.iter().map(|branch| inner(branch)).collect::<Result<_, E>>()?;
                LayerSpec::Branches(Branches { join: *join, branches })
            }
            other => other.clone(),
        })
    }

    /// The same for what `visit` changes.
    pub(super) fn for_each_mut(&mut self, visit: &mut dyn FnMut(&mut LayerSpec)) {
        visit(self);
        let mut each =
            |layers: &mut [LayerSpec]| layers.iter_mut().for_each(|layer| layer.for_each_mut(visit));
        match self {
            LayerSpec::Residual(Residual { branch, shortcut }) => {
                [branch, shortcut].into_iter().for_each(|inner| each(inner))
            }
            LayerSpec::Branches(Branches { branches, .. }) => {
                branches.iter_mut().for_each(|inner| each(inner))
            }
            _ => {}
        }
    }
}

fn needs_floats(input: Shape) -> String {
    format!("takes vectors, got {input}; put an embedding before it")
}

/// What every layer over vectors asks of its input first.
fn floats(input: Shape) -> Result<Shape, String> {
    if matches!(input, Shape::Tokens { .. }) { Err(needs_floats(input)) } else { Ok(input) }
}

fn expect_last(input: Shape, wanted: usize) -> Result<Shape, String> {
    if input.last() == wanted { Ok(input) } else { Err(format!("takes {wanted} elements, got {input}")) }
}

fn image(input: Shape) -> Result<Shape, String> {
    if matches!(input, Shape::Image { .. }) { Ok(input) } else { Err(format!("takes an image, got {input}")) }
}

fn sequence(input: Shape) -> Result<(usize, usize), String> {
    match input {
        Shape::Sequence { seq, width } => Ok((seq, width)),
        _ => Err(format!("takes a sequence of vectors, got {input}")),
    }
}

/// The image that windows of `kernel` x `kernel` make at a step of `stride`: floor((n + padding - kernel) /
/// stride) + 1, with the padding of both ends.
fn windows(input: Shape, kernel: usize, stride: usize, padding: WindowPadding) -> Result<Shape, String> {
    let Shape::Image { height, width, channels } = input else { return image(input) };
    if kernel == 0 || stride == 0 {
        return Err(format!("kernel and stride must be at least 1, got {kernel} and {stride}"));
    }
    let along = |n: usize, [before, after]: [usize; 2]| {
        let padded = n.saturating_add(before).saturating_add(after);
        padded.checked_sub(kernel).map(|span| span / stride + 1)
    };
    match (along(height, padding.rows()), along(width, padding.columns())) {
        (Some(height), Some(width)) => Ok(Shape::Image { height, width, channels }),
        _ => {
            let border =
                if padding.most() > 0 { format!(" with a border of {padding}") } else { String::new() };
            Err(format!("a window of {kernel} x {kernel} is larger than {input}{border}"))
        }
    }
}

/// How often parameters of a layer were listed: what a plan's time grows with.
#[cfg(test)]
pub(crate) mod listings {
    use std::cell::Cell;

    thread_local! {
        pub(crate) static LISTINGS: Cell<usize> = const { Cell::new(0) };
    }
}
