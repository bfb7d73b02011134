//! Shapes: what goes into a layer, what comes out, and one clear sentence where the two do not fit.
//!
//! A shape is that of one sample; the batch is never part of it. Every layer's rule stands in its own file
//! (`LayerSpec::output`), and everything else that needs shapes (flops, activation bytes, models written by
//! hand) walks through it.

use serde::Serialize;

/// The shape of one sample somewhere inside a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Shape {
    /// `[seq]` token ids: whole numbers, all others hold floats.
    Tokens {
        /// Tokens in a sample.
        seq: usize,
    },
    /// `[seq, width]`.
    Sequence {
        seq: usize,
        /// Elements of each.
        width: usize,
    },
    /// `[height, width, channels]`.
    Image {
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
        /// Elements of each pixel.
        channels: usize,
    },
    /// `[width]`.
    Vector { width: usize },
}

impl Shape {
    /// Elements of one sample. Stops at the largest number instead of wrapping: nothing of that size fits anyway.
    pub fn elements(&self) -> u64 {
        self.rows().saturating_mul(self.last() as u64)
    }

    /// The size of the last dimension: what linear layers and norms work on.
    pub fn last(&self) -> usize {
        match *self {
            Shape::Tokens { .. } => 1,
            Shape::Sequence { width, .. } | Shape::Vector { width } => width,
            Shape::Image { channels, .. } => channels,
        }
    }

    /// How many vectors of the last dimension a sample holds.
    pub fn rows(&self) -> u64 {
        match *self {
            Shape::Tokens { seq } | Shape::Sequence { seq, .. } => seq as u64,
            Shape::Image { height, width, .. } => (height as u64).saturating_mul(width as u64),
            Shape::Vector { .. } => 1,
        }
    }

    /// The same positions with another size of the last dimension.
    pub(super) fn with_last(self, size: usize) -> Shape {
        match self {
            Shape::Tokens { seq } | Shape::Sequence { seq, .. } => Shape::Sequence { seq, width: size },
            Shape::Image { height, width, .. } => Shape::Image { height, width, channels: size },
            Shape::Vector { .. } => Shape::Vector { width: size },
        }
    }

    /// Whether a dimension is zero.
    pub(super) fn is_empty(&self) -> bool {
        self.elements() == 0
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Shape::Tokens { seq } => write!(f, "{seq} token ids"),
            Shape::Sequence { seq, width } => write!(f, "a sequence of {seq} x {width}"),
            Shape::Image { height, width, channels } => {
                write!(f, "an image of {height} x {width} x {channels}")
            }
            Shape::Vector { width } => write!(f, "a vector of {width}"),
        }
    }
}

/// A layer that does not fit where it stands. `layer 4 (linear): takes 1024 elements, got a vector of 512`
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{layer}: {problem}")]
pub struct ShapeError {
    /// Which layer: its number among all layers of the model, from 0, as in the names of parameters.
    pub layer: String,
    /// What is wrong with it.
    pub problem: String,
}
