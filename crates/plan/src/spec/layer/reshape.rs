//! Layers that move elements and compute nothing.

use std::ops::Range;

use serde::Serialize;

use super::super::shape::Shape;
use super::kind::{Downstream, LayerKind};
use super::{LayerDescription, LayerSpec, Properties, TileRole, expect_last, floats, image};
use crate::field::size;

/// `[h, w, c]` becomes `[c h w]`, in the order in which PyTorch flattens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flatten;

/// Adds zero channels at the end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PadChannels {
    /// Channels that come.
    pub input: usize,
    /// Channels of the output, zeros among them.
    pub output: usize,
}

/// Some features of its input. A person does not write it: the layout does, for collectives on a slice of a
/// tensor alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FeatureSlice {
    /// Those that it keeps,
    pub at: Range<usize>,
    /// of so many.
    pub of: usize,
}

/// As a run file writes it.
pub(super) const FLATTEN: LayerKind = LayerKind {
    word: "flatten",
    fields: &[],
    opens: false,
    then: Downstream::Passes,
    complete: |_, _| Ok(LayerSpec::Flatten),
};

/// As a run file writes it.
pub(super) const PAD_CHANNELS: LayerKind = LayerKind {
    word: "pad_channels",
    fields: &[size("output")],
    opens: false,
    then: Downstream::Passes,
    complete: |written, at| {
        Ok(LayerSpec::PadChannels(PadChannels {
            input: at.shape.last(),
            output: written.values.get("output"),
        }))
    },
};

impl LayerDescription for Flatten {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        let elements = image(input)?.elements();
        Ok(Shape::Vector { width: usize::try_from(elements).map_err(|_| format!("{input} is too large"))? })
    }

    fn properties(&self) -> Properties {
        Properties { keeps_zeros: true, tile_role: TileRole::Gathered, ..Properties::PLAIN }
    }
}

impl LayerDescription for PadChannels {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        if self.output < self.input {
            return Err(format!("cannot pad {} channels to {}", self.input, self.output));
        }
        Ok(expect_last(image(input)?, self.input)?.with_last(self.output))
    }

    fn properties(&self) -> Properties {
        Properties {
            // The channels that are added stand behind all others.
            channel_groups: 0,
            tile_role: TileRole::Pixels,
            ..Properties::PLAIN
        }
    }
}

impl LayerDescription for FeatureSlice {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        Ok(expect_last(floats(input)?, self.of)?.with_last(self.at.len()))
    }
}
