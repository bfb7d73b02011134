//! The model as data. One description is costed, pruned, split and run; nothing in it computes.
//!
//! A model is a list of blocks; a block is a list of layers, and is the unit at which activations are recomputed
//! and a pipeline is cut. A layer knows its sizes and the names of its parameters: those of the Hugging Face model
//! of the same family (GPT-2), torchvision's for CNNs.
//!
//! Shapes are those of one sample: text is `[seq]` ids, then `[seq, width]`; images are
//! `[height, width, channels]` (channels last, as the kernels want them), whatever the order in a file.

pub mod activations;
mod channels;
pub mod count;
pub mod custom;
pub mod layer;
pub mod message_sizes;
mod named;
mod parameter;
pub mod presets;
pub mod recompute;
pub mod shape;
mod transient;
mod walk;

pub use activations::Precision;
pub use channels::{ChannelReader, ChannelSource, ScaledChannels};
pub use layer::*;
pub use named::Named;
pub use parameter::{BufferSpec, Init, Parameter};
pub use recompute::RecomputeMode;
pub use shape::{Shape, ShapeError};

use serde::Serialize;

/// A model as data: whole, or one rank's own.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelSpec {
    /// What a person calls it: `gpt2-124m`, `resnet-50`.
    pub name: String,
    /// What one sample looks like.
    pub input: Input,
    /// In the order in which data flows.
    pub blocks: Vec<BlockSpec>,
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
    /// Images of one size, channels last.
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
pub struct BlockSpec {
    /// `h.3`, `layer2.0`, `embedding`, `head`.
    pub name: String,
    /// In the order of execution.
    pub layers: Vec<LayerSpec>,
}
