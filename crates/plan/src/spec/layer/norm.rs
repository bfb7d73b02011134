//! Norms: over the batch, or over each position's elements. Each divides by sqrt(variance + epsilon).

use serde::Serialize;

use super::super::Init;
use super::super::parameter::{BufferSpec, Parameter, weight_and_bias};
use super::super::shape::Shape;
use super::kind::{Downstream, LayerKind};
use super::{
    AttentionRole, GradientReads, LayerDescription, LayerKernel, LayerSpec, Properties, SavedForBackward,
    TileRole, expect_last, floats,
};
use crate::field::{Field, flag, number};

/// The epsilon of the built-in models, which is PyTorch's.
pub const NORM_EPS: f32 = 1e-5;

/// Batch norm over all but the channels, with running statistics.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BatchNorm {
    /// Prefix of `.weight`, `.bias`, `.running_mean`, `.running_var`.
    pub name: String,
    /// Channels, each with a scale, a shift and two running statistics.
    pub channels: usize,
    /// What the scale starts at: 1, or 0 for the last norm of a residual branch.
    pub scale: f32,
    /// Samples that are normalised together while training; 0: all of a micro-batch.
    pub group: usize,
    /// Added to the variance.
    pub eps: f32,
}

/// Layer norm over the last dimension, with scale and perhaps shift.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerNorm {
    /// Prefix of `.weight` and `.bias`.
    pub name: String,
    /// Elements of a row, each with a scale.
    pub width: usize,
    /// Added to the variance.
    pub eps: f32,
    /// Whether there is a shift.
    pub bias: bool,
}

/// RMS norm over the last dimension, with scale.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RmsNorm {
    /// Prefix of `.weight`.
    pub name: String,
    /// Elements of a row, each with a scale.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
}

const EPS: Field = number("eps", 1e-5, ("a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0));

/// As a run file writes it.
pub(super) const BATCH_NORM: LayerKind = LayerKind {
    word: "batch_norm",
    fields: &[EPS],
    opens: false,
    then: Downstream::Passes,
    complete: |written, at| {
        let (name, channels, eps) = (at.name.clone(), at.shape.last(), written.values.get("eps"));
        Ok(LayerSpec::BatchNorm(BatchNorm { name, channels, scale: 1.0, group: 0, eps }))
    },
};

/// As a run file writes it.
pub(super) const LAYER_NORM: LayerKind = LayerKind {
    word: "layer_norm",
    fields: &[EPS, flag("bias", true)],
    opens: false,
    then: Downstream::Passes,
    complete: |written, at| {
        let (name, width, eps) = (at.name.clone(), at.shape.last(), written.values.get("eps"));
        Ok(LayerSpec::LayerNorm(LayerNorm { name, width, eps, bias: written.values.get("bias") }))
    },
};

/// As a run file writes it.
pub(super) const RMS_NORM: LayerKind = LayerKind {
    word: "rms_norm",
    fields: &[EPS],
    opens: false,
    then: Downstream::Passes,
    complete: |written, at| {
        let (name, width, eps) = (at.name.clone(), at.shape.last(), written.values.get("eps"));
        Ok(LayerSpec::RmsNorm(RmsNorm { name, width, eps }))
    },
};

/// Of the norms that measure each row by itself.
const OF_ROWS: Properties = Properties {
    weight_reads: GradientReads::ALL,
    remakes_output: true,
    kernel: LayerKernel::pass([1.0, 1.0], [1.0, 2.0]),
    attention_role: AttentionRole::Norms,
    // Each element is divided by what all of them make.
    channel_groups: 0,
    ..Properties::PLAIN
};

impl LayerDescription for BatchNorm {
    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        match input {
            Shape::Image { .. } | Shape::Vector { .. } => expect_last(input, self.channels),
            _ => Err(format!("takes images or vectors, got {input}")),
        }
    }

    fn parameters(&self) -> Vec<Parameter> {
        weight_and_bias(&self.name, vec![self.channels], Init::Constant(self.scale), Some(self.channels))
    }

    fn buffers(&self) -> Vec<BufferSpec> {
        let buffer = |(what, start)| BufferSpec {
            name: format!("{}.{what}", self.name),
            shape: vec![self.channels],
            start,
        };
        [("running_mean", 0.0), ("running_var", 1.0)].map(buffer).into()
    }

    /// Two numbers of each channel for each group that is normalised together.
    fn saves(&self, _: Shape, samples: u64) -> SavedForBackward {
        let together = if self.group > 0 { self.group as u64 } else { samples.max(1) };
        SavedForBackward { bytes: 8 * self.channels as u64 * samples / together, ..SavedForBackward::INPUT }
    }

    fn properties(&self) -> Properties {
        Properties {
            // Read once to be measured and once to be normalised.
            kernel: LayerKernel::pass([2.0, 1.0], [4.0, 1.0]),
            batch_statistics: Some(self.channels),
            tile_role: TileRole::Pixels,
            ..Properties::PLAIN
        }
    }
}

impl LayerDescription for LayerNorm {
    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        expect_last(floats(input)?, self.width)
    }

    fn parameters(&self) -> Vec<Parameter> {
        let bias = self.bias.then_some(self.width);
        weight_and_bias(&self.name, vec![self.width], Init::Constant(1.0), bias)
    }

    /// The mean of each row and what it is multiplied by.
    fn saves(&self, input: Shape, samples: u64) -> SavedForBackward {
        SavedForBackward { bytes: (8 * input.rows()).saturating_mul(samples), ..SavedForBackward::INPUT }
    }

    fn properties(&self) -> Properties {
        OF_ROWS
    }
}

impl LayerDescription for RmsNorm {
    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        expect_last(floats(input)?, self.width)
    }

    fn parameters(&self) -> Vec<Parameter> {
        weight_and_bias(&self.name, vec![self.width], Init::Constant(1.0), None)
    }

    /// What each row is multiplied by.
    fn saves(&self, input: Shape, samples: u64) -> SavedForBackward {
        SavedForBackward { bytes: (4 * input.rows()).saturating_mul(samples), ..SavedForBackward::INPUT }
    }

    fn properties(&self) -> Properties {
        OF_ROWS
    }
}
