//! Dropout.

use serde::Serialize;

use super::super::shape::Shape;
use super::kind::{Downstream, LayerKind};
use super::{LayerDescription, LayerKernel, LayerSpec, Properties, TensorRole, TileRole, floats};
use crate::field::{INSIDE, number};

/// Zeroes elements with probability `rate` while training and scales the others up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Dropout {
    /// In [0, 1).
    pub rate: f32,
    /// Where the elements lie in the whole tensor, where a rank has some of it.
    pub counted: Option<DropoutIndices>,
}

/// Which elements of a whole tensor a rank's are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DropoutIndices {
    /// Runs of equal length at equal distances. Element i is `first + i / run * of + i % run` of the full tensor,
    /// counted over all samples.
    Runs {
        /// The whole's number of the first element.
        first: usize,
        /// How many follow each other,
        run: usize,
        /// and of how many.
        of: usize,
    },
    /// Those of some samples of each micro-batch.
    Samples {
        /// Ranks that split them.
        ranks: usize,
        /// Which of them this is.
        rank: usize,
    },
}

/// As a run file writes it.
pub(super) const DROPOUT: LayerKind = LayerKind {
    word: "dropout",
    fields: &[number("rate", 0.5, INSIDE)],
    opens: false,
    then: Downstream::Passes,
    complete: |written, _| {
        Ok(LayerSpec::Dropout(Dropout { rate: written.values.get("rate"), counted: None }))
    },
};

impl LayerDescription for Dropout {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        let input = floats(input)?;
        match (0.0..1.0).contains(&self.rate) {
            true => Ok(input),
            false => Err(format!("rate must be in [0, 1), got {}", self.rate)),
        }
    }

    fn counting(&self, elements: DropoutIndices) -> Option<LayerSpec> {
        Some(LayerSpec::Dropout(Dropout { counted: Some(elements), ..*self }))
    }

    fn properties(&self) -> Properties {
        let times = if self.rate == 0.0 { 0.0 } else { 1.5 };
        Properties {
            is_random: true,
            keeps_zeros: true,
            // Random numbers are made anew in the backward pass.
            kernel: LayerKernel::pass([times; 2], [times; 2]),
            tensor_role: TensorRole::Between,
            tile_role: TileRole::Pixels,
            ..Properties::PLAIN
        }
    }
}
