//! Convolution over height and width.

use std::ops::Range;

use serde::Serialize;

use super::super::Init;
use super::super::parameter::{Parameter, weight_and_bias};
use super::super::shape::Shape;
use super::kind::{Downstream, LayerKind, PADDING};
use super::{
    GradientReads, LayerDescription, LayerKernel, LayerShard, LayerSpec, ProductSize, Properties,
    SavedForBackward, TensorRole, TileRole, WindowPadding, expect_last, image, windows,
};
use crate::field::{LARGEST, flag, integer, size};
use crate::tiles::SlidingWindow;

/// Convolution over height and width; the weight is `[output, kernel, kernel, input]`, channels last as images are.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Conv {
    /// Prefix of `.weight` and `.bias`.
    pub name: String,
    /// Channels of the image that it reads.
    pub input: usize,
    /// Channels of the image that it makes: one filter each.
    pub output: usize,
    /// Rows and columns of the kernel.
    pub kernel: usize,
    /// Along rows and columns.
    pub stride: usize,
    /// Zeros around the image.
    pub padding: WindowPadding,
    /// Whether there is a bias.
    pub bias: bool,
    /// How the weight starts.
    pub init: Init,
}

/// As a run file writes it.
pub(super) const CONV: LayerKind = LayerKind {
    word: "conv",
    fields: &[size("output"), size("kernel"), integer("stride", 1, 1, LARGEST), PADDING, flag("bias", true)],
    opens: true,
    then: Downstream::Linear,
    complete: |written, at| {
        let (input, kernel): (_, usize) = (at.shape.last(), written.values.get("kernel"));
        Ok(LayerSpec::Conv(Conv {
            name: at.name.clone(),
            input,
            output: written.values.get("output"),
            kernel,
            stride: written.values.get("stride"),
            padding: written.padding(at.shape),
            bias: written.values.get("bias"),
            init: at.fan_in(input.saturating_mul(kernel).saturating_mul(kernel)),
        }))
    },
};

impl LayerDescription for Conv {
    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        let input = expect_last(image(input)?, self.input)?;
        Ok(windows(input, self.kernel, self.stride, self.padding)?.with_last(self.output))
    }

    fn parameters(&self) -> Vec<Parameter> {
        let shape = vec![self.output, self.kernel, self.kernel, self.input];
        weight_and_bias(&self.name, shape, self.init, self.bias.then_some(self.output))
    }

    fn flops(&self, _: Shape, output: Shape) -> f64 {
        2.0 * output.elements() as f64 * self.input as f64 * (self.kernel as f64).powi(2)
    }

    fn saves(&self, _: Shape, _: u64) -> SavedForBackward {
        SavedForBackward::INPUT
    }

    fn split_outputs(&self, ranges: &[Range<usize>]) -> Option<LayerShard> {
        let output = ranges.iter().map(ExactSizeIterator::len).sum();
        let layer = LayerSpec::Conv(Conv { output, ..self.clone() });
        Some(LayerShard { layer, dims: vec![Some(0); 2], behind: None })
    }

    fn padded(&self, padding: WindowPadding) -> Option<LayerSpec> {
        Some(LayerSpec::Conv(Conv { padding, ..self.clone() }))
    }

    fn properties(&self) -> Properties {
        let Conv { input, output, kernel, stride, padding, .. } = *self;
        let size = ProductSize { input, output };
        Properties {
            weight_reads: GradientReads::PRODUCT,
            kernel: LayerKernel::Convolution { kernel, size },
            product_size: Some(size),
            tensor_role: TensorRole::ColumnParallel,
            tile_role: TileRole::Window(SlidingWindow { kernel, stride, padding }),
            hides_halo: true,
            ..Properties::PLAIN
        }
    }
}
