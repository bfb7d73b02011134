//! Linear layers over the last dimension.

use std::ops::Range;

use serde::Serialize;

use super::super::Init;
use super::super::parameter::{Parameter, weight_and_bias};
use super::super::shape::Shape;
use super::kind::{Downstream, LayerKind};
use super::{
    AttentionRole, Bias, GradientReads, LayerDescription, LayerKernel, LayerShard, LayerSpec, ProductSize,
    Properties, SavedForBackward, TensorRole, expect_last, needs_floats,
};
use crate::field::{LARGEST, flag, optional_integer};

/// How a linear layer's weight lies in memory and in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum WeightOrder {
    /// `[output, input]`, as PyTorch's `Linear`.
    OutIn,
    /// `[input, output]`, as GPT-2's `Conv1D`.
    InOut,
}

impl WeightOrder {
    /// Which dimension is that of the outputs.
    fn output_dim(self) -> usize {
        usize::from(self == WeightOrder::InOut)
    }
}

/// `y = x W + b` over the last dimension.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Linear {
    /// Prefix of `.weight` and `.bias`.
    pub name: String,
    /// Width of x.
    pub input: usize,
    /// Width of y.
    pub output: usize,
    /// Whether there is a b.
    pub bias: bool,
    /// Which of input and output comes first in W.
    pub order: WeightOrder,
    /// What W is before the first step.
    pub init: Init,
}

/// A linear layer without bias whose weight `[output, input]` belongs to another layer (a tied output head).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TiedLinear {
    /// The full name of the weight: `wte.weight`.
    pub weight: String,
    /// Width of x.
    pub input: usize,
    /// Width of y.
    pub output: usize,
}

/// As a run file writes it.
pub(super) const LINEAR: LayerKind = LayerKind {
    word: "linear",
    fields: &[optional_integer("output", 1, LARGEST), flag("bias", true)],
    opens: true,
    then: Downstream::Linear,
    complete: |written, at| {
        let input = at.shape.last();
        Ok(LayerSpec::Linear(Linear {
            name: at.name.clone(),
            input,
            output: written.values.find("output").unwrap_or(at.classes),
            bias: written.values.get("bias"),
            order: WeightOrder::OutIn,
            init: at.fan_in(input),
        }))
    },
};

impl LayerDescription for Linear {
    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        product(input, self.input, self.output)
    }

    fn parameters(&self) -> Vec<Parameter> {
        let shape = match self.order {
            WeightOrder::OutIn => vec![self.output, self.input],
            WeightOrder::InOut => vec![self.input, self.output],
        };
        let mut all = weight_and_bias(&self.name, shape, self.init, self.bias.then_some(self.output));
        all[0].output_dim = self.order.output_dim();
        all
    }

    fn flops(&self, input: Shape, _: Shape) -> f64 {
        flops(input, self.input, self.output)
    }

    fn saves(&self, _: Shape, _: u64) -> SavedForBackward {
        SavedForBackward::INPUT
    }

    fn split_outputs(&self, ranges: &[Range<usize>]) -> Option<LayerShard> {
        let output = ranges.iter().map(ExactSizeIterator::len).sum();
        let layer = LayerSpec::Linear(Linear { output, ..self.clone() });
        Some(LayerShard { layer, dims: vec![Some(self.order.output_dim()), Some(0)], behind: None })
    }

    /// The bias is added behind the all-reduce.
    fn split_inputs(&self, range: &Range<usize>) -> Option<LayerShard> {
        let bias = Bias { name: self.name.clone(), width: self.output };
        Some(LayerShard {
            layer: LayerSpec::Linear(Linear { input: range.len(), bias: false, ..self.clone() }),
            dims: vec![Some(1 - self.order.output_dim()), None],
            behind: self.bias.then_some(LayerSpec::Bias(bias)),
        })
    }

    fn properties(&self) -> Properties {
        Properties {
            attention_role: AttentionRole::Projects,
            tensor_role: TensorRole::ColumnOrRowParallel,
            ..multiplying(self.input, self.output)
        }
    }
}

impl LayerDescription for TiedLinear {
    fn tied_weight(&self) -> Option<&str> {
        Some(&self.weight)
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        product(input, self.input, self.output)
    }

    fn flops(&self, input: Shape, _: Shape) -> f64 {
        flops(input, self.input, self.output)
    }

    fn saves(&self, _: Shape, _: u64) -> SavedForBackward {
        SavedForBackward::INPUT
    }

    /// The weight is split where its own layer is.
    fn split_outputs(&self, ranges: &[Range<usize>]) -> Option<LayerShard> {
        let output = ranges.iter().map(ExactSizeIterator::len).sum();
        let layer = LayerSpec::TiedLinear(TiedLinear { output, ..self.clone() });
        Some(LayerShard { layer, dims: Vec::new(), behind: None })
    }

    fn properties(&self) -> Properties {
        Properties { tensor_role: TensorRole::ColumnParallel, ..multiplying(self.input, self.output) }
    }
}

/// What every product of so many columns has.
fn multiplying(input: usize, output: usize) -> Properties {
    let size = ProductSize { input, output };
    Properties {
        weight_reads: GradientReads::PRODUCT,
        takes_remade: true,
        kernel: LayerKernel::Product(size),
        product_size: Some(size),
        ..Properties::PLAIN
    }
}

fn product(input: Shape, width: usize, output: usize) -> Result<Shape, String> {
    match input {
        Shape::Image { .. } => Err(format!("takes vectors, got {input}; put a flatten before it")),
        Shape::Tokens { .. } => Err(needs_floats(input)),
        _ => Ok(expect_last(input, width)?.with_last(output)),
    }
}

fn flops(input: Shape, width: usize, output: usize) -> f64 {
    2.0 * input.rows() as f64 * width as f64 * output as f64
}
