//! The model as data. One description is costed, pruned, split and run; nothing in it computes.
//!
//! A model is a list of blocks; a block is a list of layers, and is the unit at which activations are recomputed
//! and a pipeline is cut. A layer knows its sizes and the names of its parameters: those of the Hugging Face model
//! of the same family (GPT-2), torchvision's for CNNs.
//!
//! Shapes are those of one sample: text is `[seq]` ids, then `[seq, width]`; images are `[height, width, channels]`
//! (channels last, as the kernels want them), whatever the order in a file.

pub mod activations;
mod channels;
pub mod count;
pub mod custom;
pub mod presets;
pub mod shape;

pub use activations::{Precision, Recompute};
pub use channels::{Reader, ScaledChannels, Source};
pub use count::{Buffer, Parameter};
pub use shape::{Shape, ShapeError};

use serde::Serialize;

/// A whole model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Model {
    /// What a person calls it: `gpt2-124m`, `resnet-50`.
    pub name: String,
    /// What one sample looks like.
    pub input: Input,
    /// In the order in which data flows.
    pub blocks: Vec<Block>,
    /// Logits per prediction: classes of an image, or the vocabulary.
    pub classes: usize,
}

/// What one sample looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Input {
    /// `seq` token ids, each to be followed by a prediction of the next.
    Tokens {
        /// Tokens in a sample.
        seq: usize,
        /// Ids are below this.
        vocab: usize,
    },
    /// An image.
    Image {
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
        /// Colours.
        channels: usize,
    },
}

/// The unit of recomputation and of pipeline cuts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Block {
    /// `h.3`, `layer2.0`, `embedding`, `head`.
    pub name: String,
    /// In order.
    pub layers: Vec<Layer>,
}

/// An element-wise non-linearity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// max(x, 0)
    Relu,
    /// x Phi(x), in GPT-2's tanh form
    Gelu,
    /// x sigmoid(x)
    Silu,
}

/// How a linear layer's weight lies in memory and in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum WeightOrder {
    /// `[output, input]`, as PyTorch's `Linear`.
    OutIn,
    /// `[input, output]`, as GPT-2's `Conv1D`.
    InOut,
}

/// How the elements of a parameter start.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum Init {
    /// All the same: 0 for biases, 1 for norm scales.
    Constant(f32),
    /// Normal with this standard deviation.
    Normal(f32),
    /// Normal with this standard deviation, cut at two of them and rescaled so that the deviation is the one given.
    TruncatedNormal(f32),
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Layer {
    /// `y = x W + b` over the last dimension.
    Linear {
        /// Prefix of `.weight` and `.bias`.
        name: String,
        /// Width of x.
        input: usize,
        /// Width of y.
        output: usize,
        /// Whether there is a b.
        bias: bool,
        /// How W lies.
        order: WeightOrder,
        /// How W starts.
        init: Init,
    },
    /// A linear layer without bias whose weight `[output, input]` belongs to another layer (a tied output head).
    TiedLinear {
        /// The full name of the weight: `wte.weight`.
        weight: String,
        /// Width of x.
        input: usize,
        /// Width of y.
        output: usize,
    },
    /// Convolution over height and width; the weight is `[output, input, kernel, kernel]`.
    Conv {
        /// Prefix of `.weight` and `.bias`.
        name: String,
        /// Channels in.
        input: usize,
        /// Channels out.
        output: usize,
        /// Rows and columns of the kernel.
        kernel: usize,
        /// Step, both ways.
        stride: usize,
        /// Zeros around the image, on every side.
        padding: usize,
        /// Whether there is a bias.
        bias: bool,
        /// How the weight starts.
        init: Init,
    },
    /// The largest of each window.
    MaxPool {
        /// Rows and columns of the window.
        kernel: usize,
        /// Step.
        stride: usize,
        /// Border, never chosen as the largest.
        padding: usize,
    },
    /// The mean of each window.
    AvgPool {
        /// Rows and columns of the window.
        kernel: usize,
        /// Step.
        stride: usize,
    },
    /// The mean over all positions: `[h, w, c]` becomes `[c]`.
    GlobalAvgPool,
    /// Average pool to exactly `size` x `size` (VGG's head).
    AdaptiveAvgPool {
        /// Rows and columns of the result.
        size: usize,
    },
    /// `[h, w, c]` becomes `[c h w]`, in the order in which PyTorch flattens, so that the next weight fits.
    Flatten,
    /// Adds zero channels at the end (the shortcut of resnet8).
    PadChannels {
        /// Channels in.
        input: usize,
        /// Channels out.
        output: usize,
    },
    /// Batch norm over all but the channels, with running statistics.
    BatchNorm {
        /// Prefix of `.weight`, `.bias`, `.running_mean`, `.running_var`.
        name: String,
        /// Channels.
        channels: usize,
        /// What the scale starts at: 1, or 0 for the last norm of a residual branch.
        scale: f32,
        /// Samples that are normalised together while training; 0: all of a micro-batch.
        group: usize,
    },
    /// Layer norm over the last dimension, with scale and shift.
    LayerNorm {
        /// Prefix of `.weight` and `.bias`.
        name: String,
        /// Width.
        width: usize,
    },
    /// RMS norm over the last dimension, with scale.
    RmsNorm {
        /// Prefix of `.weight`.
        name: String,
        /// Width.
        width: usize,
    },
    /// A non-linearity.
    Activation(Activation),
    /// Zeroes elements with probability `rate` while training and scales the others up.
    Dropout {
        /// In [0, 1).
        rate: f32,
    },
    /// Token ids to vectors.
    Embedding {
        /// Prefix of `.weight`.
        name: String,
        /// Rows.
        vocab: usize,
        /// Columns.
        width: usize,
        /// How the table starts.
        init: Init,
    },
    /// Adds a learnt vector for each position.
    PositionEmbedding {
        /// Prefix of `.weight`.
        name: String,
        /// Rows: the longest sequence.
        context: usize,
        /// Columns.
        width: usize,
        /// How the table starts.
        init: Init,
    },
    /// Causal multi-head attention proper: `[seq, 3 width]` (queries, keys, values side by side) becomes `[seq, width]`.
    Attention {
        /// Heads, of `width / heads` each.
        heads: usize,
        /// Width.
        width: usize,
    },
    /// `y = branch(x) + shortcut(x)`; an empty shortcut is x itself.
    Residual {
        /// The long way.
        branch: Vec<Layer>,
        /// The short way.
        shortcut: Vec<Layer>,
    },
}
