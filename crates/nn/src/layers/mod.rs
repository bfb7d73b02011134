//! Layers: forward and backward, one file each. A layer's mathematics does not know that it is parallel.
//!
//! A layer is immutable and holds only the ids of its parameters. What the backward pass needs is pushed on a
//! [`Stash`] by the forward pass and popped in reverse: one stash per micro-batch in flight. Gradients of
//! parameters leave through the [`GradientSink`] the moment they can be computed; they are handed over as a
//! closure, so that a sink may also compute them later (zero-bubble pipelines run input and weight gradients
//! apart).

mod activation;
mod all_to_all;
mod attention;
mod batch_norm;
mod bias;
mod branches;
mod cache;
mod chain;
mod collective;
mod columns;
mod conv;
mod dropout;
mod embedding;
mod frozen_gates;
mod head;
mod input_sharding;
mod linear;
mod norm;
mod norm_conv;
mod norm_pool;
mod pool;
mod projection;
mod recompute;
pub mod spatial;
mod sum;
mod sync_batch_norm;

use std::fmt::Debug;
use std::ops::Range;

use espalier_tensor::ops::padding::Padding;
use espalier_tensor::{StashedTensor, Tensor};

pub(crate) use activation::ActivationLayer;
pub(crate) use attention::{Attention, QkScales, RotaryTable};
pub(crate) use batch_norm::BatchNorm;
pub(crate) use bias::Bias;
pub(crate) use branches::{Branches, ReluResidual, Residual, Sequence};
pub use cache::KvCache;
pub(crate) use chain::{Chain, ChainLink, ChainPrologue};
pub(crate) use collective::CollectiveLayer;
pub(crate) use columns::Columns;
pub(crate) use conv::ConvLayer;
pub(crate) use dropout::Dropout;
pub(crate) use embedding::{Embedding, PositionEmbedding};
pub use frozen_gates::FrozenGates;
pub(crate) use frozen_gates::{FrozenMaxPool, FrozenRelu};
pub(crate) use head::{Head, LogitShard};
pub use head::{HeadOutput, LossScaling};
pub(crate) use input_sharding::{InputShard, InputSharding};
pub(crate) use linear::Linear;
pub(crate) use norm::NormLayer;
pub(crate) use norm_conv::NormConv;
pub(crate) use norm_pool::NormPool;
pub(crate) use pool::{AdaptiveAvgPool, AvgPool, Flatten, GlobalAvgPool, MaxPool, PadChannels};
pub(crate) use projection::Projection;
pub(crate) use recompute::RecomputeLayer;
use sum::sum;
pub(crate) use sync_batch_norm::SyncBatchNorm;

use crate::Result;
use crate::weights::{BufferId, ParameterId, WeightStore};

/// Ranges of these sizes, one behind the other.
fn consecutive(sizes: &[usize]) -> impl Iterator<Item = Range<usize>> {
    sizes.iter().scan(0, |end, size| {
        *end += size;
        Some(*end - size..*end)
    })
}

/// Padding as the operations take it.
pub(crate) fn padding_of(spec: espalier_plan::spec::WindowPadding) -> Padding {
    let espalier_plan::spec::WindowPadding { top, bottom, left, right } = spec;
    Padding { top, bottom, left, right }
}

/// A step of the forward pass and its reverse.
pub trait Layer: Send + Sync + Debug {
    /// The output for `x`, leaving on the stash what [`Layer::backward`] needs.
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor>;

    /// From the gradient of the output to that of the input, which is left out where `needs_dx` is false
    /// (the first layer of a model) or the input has none (token ids).
    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>>;

    /// The same for a gradient that may come in two parts, and may go so: a residual block leaves its sum to the
    /// block before it, whose norm reads both parts in one pass.
    fn backward_parts(
        &self,
        dy: GradientParts,
        ctx: &mut BackwardContext<'_>,
        needs_dx: bool,
    ) -> Result<Option<GradientParts>> {
        Ok(self.backward(dy.join()?, ctx, needs_dx)?.map(GradientParts::from))
    }

    /// The output plus a tensor of its shape. A layer that ends in a product can add on its way out.
    fn forward_plus(&self, x: Tensor, plus: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        sum(self.forward(x, ctx)?, plus)
    }

    /// The gradient of the input plus a tensor of its shape. A layer that begins with a norm can add on its
    /// way out.
    fn backward_plus(&self, dy: Tensor, plus: Tensor, ctx: &mut BackwardContext<'_>) -> Result<Tensor> {
        let dx = self.backward(dy, ctx, true)?.expect("an input to which something is added has a gradient");
        sum(dx, plus)
    }
}

/// A gradient, perhaps as a sum that is yet to be made.
#[derive(Debug)]
pub struct GradientParts {
    pub dy: Tensor,
    pub plus: Option<Tensor>,
}

impl GradientParts {
    /// The gradient itself.
    pub fn join(self) -> Result<Tensor> {
        match self.plus {
            Some(plus) => sum(self.dy, plus),
            None => Ok(self.dy),
        }
    }
}

impl From<Tensor> for GradientParts {
    fn from(dy: Tensor) -> GradientParts {
        GradientParts { dy, plus: None }
    }
}

/// Whether a forward pass is followed by a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Dropout drops, batch norm measures.
    Train,
    /// Dropout passes, batch norm uses its running statistics.
    Evaluate,
}

/// What a forward pass reads and leaves behind.
pub struct ForwardContext<'a> {
    /// Parameters and running statistics.
    pub weights: &'a dyn WeightStore,
    /// What the pass is for.
    pub mode: Mode,
    /// The key of the step's random numbers: a function of seed and step.
    pub random: u64,
    /// Which of the step's samples these are.
    pub batch_slice: BatchSlice,
    /// Where several documents lie in a sequence: the index of each token in its own, u32 `[batch, seq]`.
    pub positions: Option<&'a Tensor>,
    /// What the backward pass will pop.
    pub stash: Stash,
    /// What batch norm measured, to be folded into the running statistics if the step is taken.
    pub statistics: Vec<BatchStatistics>,
    /// Keys and values of the positions before these, where a sequence is read in pieces.
    pub cache: Option<&'a mut KvCache>,
    /// Observes what linear layers read.
    pub observer: Option<&'a mut dyn InputObserver>,
}

/// Observes what every linear layer reads in the forward pass, the head's included: statistics of activations
/// that a one-shot pruner scores weights by. What runs again in the backward pass is not shown a second time.
pub trait InputObserver {
    /// `x`: `[rows, in_features]`, of the layer that has this weight. Where tensor parallelism splits the
    /// layer by its inputs, these are the rank's.
    fn observe(&mut self, weight: ParameterId, x: &Tensor) -> Result<()>;
}

impl<'a> ForwardContext<'a> {
    /// A pass of complete sequences without an observer. Its stash keeps what is pushed where a backward pass
    /// follows.
    pub fn new(
        weights: &'a dyn WeightStore,
        mode: Mode,
        random: u64,
        batch_slice: BatchSlice,
    ) -> ForwardContext<'a> {
        let stash = match mode {
            Mode::Train => Stash::default(),
            Mode::Evaluate => Stash::forgetful(),
        };
        ForwardContext {
            weights,
            mode,
            random,
            batch_slice,
            positions: None,
            stash,
            statistics: Vec::new(),
            cache: None,
            observer: None,
        }
    }

    /// Runs some layers with the weights of their block; `next` is the one that the pass comes to behind it,
    /// where there is one.
    pub(crate) fn in_block<T>(
        &mut self,
        block: usize,
        next: Option<usize>,
        run: impl FnOnce(&mut ForwardContext<'_>) -> Result<T>,
    ) -> Result<T> {
        let Some(weights) = self.weights.enter(block, next)? else { return run(self) };
        let mut inner = ForwardContext {
            weights: &*weights,
            stash: std::mem::take(&mut self.stash),
            statistics: std::mem::take(&mut self.statistics),
            cache: self.cache.as_deref_mut(),
            observer: match &mut self.observer {
                Some(observer) => Some(&mut **observer),
                None => None,
            },
            ..*self
        };
        let result = run(&mut inner);
        let ForwardContext { stash, statistics, .. } = inner;
        (self.stash, self.statistics) = (stash, statistics);
        result
    }

    /// Shows the observer what a linear layer is about to read.
    pub(crate) fn observe(&mut self, linear: &Linear, x: &Tensor) -> Result<()> {
        match &mut self.observer {
            Some(observer) => observer.observe(linear.weight, &x.clone().reshape(&[x.rows(), x.width()])),
            None => Ok(()),
        }
    }

    /// Whether it takes one position of a text that is being generated through the model, as what a layer reads
    /// of it.
    fn is_of_one_row(&self, x: &Tensor) -> bool {
        self.cache.is_some() && x.rows() == 1
    }
}

/// What a backward pass reads and where its gradients go.
pub struct BackwardContext<'a> {
    /// The weights that the forward pass used.
    pub weights: &'a dyn WeightStore,
    /// The key that the forward pass used.
    pub random: u64,
    /// The samples that the forward pass saw.
    pub batch_slice: BatchSlice,
    /// The positions that it was given.
    pub positions: Option<&'a Tensor>,
    /// What the forward pass left.
    pub stash: &'a mut Stash,
    /// Where gradients of parameters go.
    pub sink: &'a mut dyn GradientSink,
}

impl<'a> BackwardContext<'a> {
    /// Runs the backward pass of some layers with the weights of their block.
    pub(crate) fn in_block<T>(
        &mut self,
        block: usize,
        next: Option<usize>,
        run: impl FnOnce(&mut BackwardContext<'_>) -> Result<T>,
    ) -> Result<T> {
        match self.weights.enter(block, next)? {
            None => run(self),
            Some(weights) => run(&mut BackwardContext {
                weights: &*weights,
                stash: &mut *self.stash,
                sink: &mut *self.sink,
                ..*self
            }),
        }
    }

    /// The backward pass of a forward pass.
    pub fn of(forward: &'a mut ForwardContext<'_>, sink: &'a mut dyn GradientSink) -> BackwardContext<'a> {
        let ForwardContext { weights, random, batch_slice, positions, ref mut stash, .. } = *forward;
        BackwardContext { weights, random, batch_slice, positions, stash, sink }
    }
}

/// A micro-batch among the samples of its step. The default is the only one.
#[derive(Debug, Clone, Copy, Default)]
pub struct BatchSlice {
    /// Samples of the step before its first, over all micro-batches and ranks. Random numbers are counted
    /// from there, so that they do not depend on how a batch is split.
    pub first: usize,
    /// How many samples it has.
    pub samples: usize,
    /// Whose samples batch norms measure together with these.
    pub norms: NormGroup,
}

/// Whose samples batch norms measure together: in any case those of ranks that have other pixels of the same
/// images, or other samples of the same micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NormGroup {
    /// A replica's own: where no step is taken, another may have fewer micro-batches, and would not take part.
    #[default]
    Replica,
    /// Those that steps of training measure together: every replica has a micro-batch beside this one.
    Step,
    /// Those of all replicas, over which one group of samples is split.
    AllReplicas {
        /// Whether this one has got none of them: the sample that it runs stands in, and is not counted.
        stands_in: bool,
    },
}

impl BatchSlice {
    /// The number within the step of the first element of a tensor that has so many for each sample.
    pub(crate) fn first_element(&self, of_each: usize) -> u64 {
        self.first as u64 * of_each as u64
    }
}

/// The mean and variance of one batch, measured by a batch norm.
#[derive(Debug, Clone)]
pub struct BatchStatistics {
    /// The running mean to update.
    pub mean_id: BufferId,
    /// The running variance to update.
    pub variance_id: BufferId,
    /// The batch's mean, f32 `[channels]`.
    pub mean: Tensor,
    /// One over the batch's standard deviation, f32 `[channels]`.
    pub rstd: Tensor,
    /// Values that each was taken over.
    pub count: usize,
    /// Which group of samples of the micro-batch.
    pub group: usize,
    /// What was added to the variances.
    pub eps: f32,
}

/// Tensors that wait for the backward pass, last in, first out.
#[derive(Debug, Default)]
pub struct Stash {
    saved: Vec<StashedTensor>,
    forgets: bool,
}

impl Stash {
    /// A stash that forgets at once: for evaluation, and for a block that will be recomputed.
    pub(crate) fn forgetful() -> Stash {
        Stash { saved: Vec::new(), forgets: true }
    }

    /// Saves a tensor, or forgets it where nothing is kept.
    pub fn push(&mut self, tensor: Tensor) {
        if !self.forgets {
            self.saved.push(StashedTensor::new(tensor));
        }
    }

    /// Takes the last one saved.
    pub fn pop(&mut self) -> Tensor {
        self.saved.pop().expect("every pop of a backward pass has its push in the forward pass").take()
    }

    /// Whether all that was saved has been taken: so it is behind a backward pass.
    pub fn is_empty(&self) -> bool {
        self.saved.is_empty()
    }
}

/// The gradients of some parameters, yet to be made: by a product that no other layer waits for.
pub struct WeightGradients {
    /// What they are made from, of activations and their gradients.
    reads: Vec<Tensor>,
    make: Box<dyn FnOnce(GradientElements) -> Result<Vec<Tensor>> + Send>,
}

impl WeightGradients {
    /// Made by `make`, which holds what it reads itself.
    pub fn new(
        reads: impl Into<Vec<Tensor>>,
        make: impl FnOnce(GradientElements) -> Result<Vec<Tensor>> + Send + 'static,
    ) -> WeightGradients {
        WeightGradients { reads: reads.into(), make: Box::new(make) }
    }

    /// Makes them, in the order of their parameters.
    pub fn make(self, wanted: GradientElements) -> Result<Vec<Tensor>> {
        drop(self.reads);
        (self.make)(wanted)
    }
}

/// What a sink wants of gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientElements {
    /// All elements, in the shape of the parameter.
    All,
    /// Those of kept weights: a layer that can spare itself the others gives `[kept]`, in their order, and
    /// one that cannot gives all.
    Kept,
}

/// The one door that every gradient of a parameter passes.
pub trait GradientSink {
    /// Takes the gradients of `parameters`, in their order, of one micro-batch. A tied parameter comes once
    /// per use.
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()>;
}

/// A sink that makes gradients later, so that those of inputs can run ahead. Until then it keeps what they read.
#[derive(Default)]
pub struct DeferredGradients {
    waiting: Vec<(Vec<ParameterId>, Vec<StashedTensor>, WeightGradients)>,
}

impl Debug for DeferredGradients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.waiting.iter().map(|(parameters, ..)| parameters)).finish()
    }
}

impl GradientSink for DeferredGradients {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        let saved = gradients.reads.iter().cloned().map(StashedTensor::new).collect();
        self.waiting.push((parameters.to_vec(), saved, gradients));
        Ok(())
    }
}

impl DeferredGradients {
    /// Computes all that waits, in the order in which it came, into `sink`.
    pub fn run(self, sink: &mut dyn GradientSink) -> Result<()> {
        self.waiting.into_iter().try_for_each(|(parameters, saved, gradients)| {
            drop(saved);
            sink.accept(&parameters, gradients)
        })
    }
}
