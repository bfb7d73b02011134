//! A bias by itself: that of a linear layer whose products are all-reduced first.

use serde::Serialize;

use super::super::parameter::{Parameter, bias};
use super::super::shape::Shape;
use super::{GradientReads, LayerDescription, LayerKernel, Properties, expect_last, floats};

/// Adds a learnt vector to every row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bias {
    /// Prefix of `.bias`.
    pub name: String,
    /// Elements of the vector, and of the rows it is added to.
    pub width: usize,
}

impl LayerDescription for Bias {
    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        expect_last(floats(input)?, self.width)
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![bias(&self.name, self.width)]
    }

    fn properties(&self) -> Properties {
        Properties {
            weight_reads: GradientReads::GRADIENT,
            passes_gradient: true,
            kernel: LayerKernel::light([0.0, 2.0], [0.0, 1.0]),
            ..Properties::PLAIN
        }
    }
}
