//! What is timed: the operations of layers, each with what a planner counts of it.

use std::fmt;

use espalier_plan::cluster::ConvolutionPass;
use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::conv::{self, ConvParams};
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::ops::{attention, elementwise, layer_norm};
use espalier_tensor::{Category, DType, Device, Result};

use super::layers::{ConvolutionSize, RepeatedLayers, random_tensor};
use super::sparse_work::SparseWork;
use crate::bench::timing::TimedWork;

/// An operation of a layer, forward and backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BenchOp {
    /// The three products of a linear layer.
    Linear { rows: usize, input: usize, output: usize },
    /// The three passes of a convolution over square images, padded so that windows are as many as pixels
    /// over strides.
    Convolution(ConvolutionSize),
    /// One pass of such a convolution.
    ConvolutionPass { of: ConvolutionSize, pass: TimedConvPass },
    /// Work of which a fraction of the numbers is not zero.
    Sparse { work: SparseWork, kept: f64 },
    /// Both passes of causal attention.
    Attention { batch: usize, positions: usize, heads: usize, width: usize },
    /// A sum, an activation, and both passes of a norm.
    Elementwise { rows: usize, width: usize },
    /// A sum, and both passes of a ReLU: numbers are moved, and next to nothing is done with them.
    LightElementwise { rows: usize, width: usize },
    /// So few numbers that only the start of an operation takes time.
    Launch,
}

/// The passes of a convolution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TimedConvPass {
    Forward,
    Input,
    Weight,
}

impl ConvolutionSize {
    /// Each pass, with its sizes as a planner counts them.
    pub fn passes(self) -> [(BenchOp, ConvolutionPass); 3] {
        let ConvolutionSize { batch, side, input, output, kernel, stride } = self;
        let outputs = side.div_ceil(stride);
        let pixels = [batch * side * side, batch * outputs * outputs].map(|pixels| pixels as f64);
        let [forward, of_input, of_weight] = ConvolutionPass::all(kernel, input, output, pixels);
        let op = |pass| BenchOp::ConvolutionPass { of: self, pass };
        [
            (op(TimedConvPass::Forward), forward),
            (op(TimedConvPass::Input), of_input),
            (op(TimedConvPass::Weight), of_weight),
        ]
    }
}

impl BenchOp {
    /// Flops of a pass, or bytes that it reads and writes.
    pub fn size(&self, dtype: DType) -> f64 {
        let product = |sizes: &[usize]| sizes.iter().map(|&n| n as f64).product::<f64>();
        match *self {
            BenchOp::Linear { rows, input, output } => 2.0 * product(&[rows, input, output]),
            BenchOp::Sparse { work, .. } => work.flops(),
            BenchOp::Convolution(of) | BenchOp::ConvolutionPass { of, .. } => of.flops(),
            // Two products of all positions with half of them.
            BenchOp::Attention { batch, positions, heads: _, width } => {
                2.0 * product(&[batch, positions, positions, width])
            }
            // The sum moves three tensors, the activation two, the norm two and three.
            BenchOp::Elementwise { rows, width } => 2.5 * product(&[rows, width, dtype.bytes()]),
            // Three tensors, two and three.
            BenchOp::LightElementwise { rows, width } => 8.0 / 3.0 * product(&[rows, width, dtype.bytes()]),
            BenchOp::Launch => 0.0,
        }
    }

    /// Passes that are timed together. Attention's backward pass counts as two.
    pub fn pass_count(&self) -> f64 {
        match self {
            BenchOp::Linear { .. }
            | BenchOp::Convolution(_)
            | BenchOp::Attention { .. }
            | BenchOp::LightElementwise { .. } => 3.0,
            BenchOp::Elementwise { .. } => 4.0,
            BenchOp::Sparse { work, .. } => work.pass_count(),
            BenchOp::Launch | BenchOp::ConvolutionPass { .. } => 1.0,
        }
    }

    /// In one word.
    pub fn kind(&self) -> &'static str {
        match self {
            BenchOp::Linear { .. } => "product",
            BenchOp::Sparse { .. } => "sparse",
            BenchOp::Convolution(_) | BenchOp::ConvolutionPass { .. } => "convolution",
            BenchOp::Attention { .. } => "attention",
            BenchOp::Elementwise { .. } => "pass",
            BenchOp::LightElementwise { .. } => "light pass",
            BenchOp::Launch => "start",
        }
    }

    /// All its passes, ready to be run again and again.
    pub fn prepare(&self, device: &Device, dtype: DType) -> Result<TimedWork> {
        let tensor = |shape: &[usize]| random_tensor(device, shape, dtype);
        let activations = Category::Activations;
        Ok(match *self {
            BenchOp::Linear { rows, input, output } => {
                let shapes = [vec![rows, input], vec![output, input], vec![rows, output]];
                RepeatedLayers::with_shapes(device, dtype, shapes)?.each(move |[x, w, dy]| {
                    Ok(vec![
                        matmul(x, w.t(), None, activations)?,
                        matmul(dy, w, None, activations)?,
                        matmul(dy.t(), x, None, activations)?,
                    ])
                })
            }
            BenchOp::Convolution(of) | BenchOp::ConvolutionPass { of, .. } => {
                let ConvolutionSize { batch, side, input, output, kernel, stride } = of;
                let conv = ConvParams { kernel, stride, padding: (kernel / 2).into() };
                let [height, width] = conv.output_size([side, side]);
                let shapes = [
                    vec![batch, side, side, input],
                    vec![output, kernel, kernel, input],
                    vec![batch, height, width, output],
                ];
                let layers = RepeatedLayers::with_shapes(device, dtype, shapes)?;
                let passes = match *self {
                    BenchOp::ConvolutionPass { pass, .. } => vec![pass],
                    _ => vec![TimedConvPass::Forward, TimedConvPass::Input, TimedConvPass::Weight],
                };
                layers.each(move |[x, w, dy]| {
                    let pass = |pass: &TimedConvPass| match pass {
                        TimedConvPass::Forward => conv::forward(x, w, None, conv),
                        TimedConvPass::Input => conv::backward_input(dy, w, conv, x.shape()),
                        TimedConvPass::Weight => conv::backward_weight(x, dy, conv),
                    };
                    passes.iter().map(pass).collect()
                })
            }
            BenchOp::Sparse { work, kept } => return work.prepare(device, dtype, kept),
            BenchOp::Attention { batch, positions, heads, width } => {
                let qkv = tensor(&[batch, positions, 3 * width])?;
                let dy = tensor(&[batch, positions, width])?;
                Box::new(move || {
                    let (y, logsumexp) = attention::forward(&qkv, heads, heads)?;
                    attention::backward(&dy, &qkv, &y, &logsumexp, heads, heads).map(drop)
                })
            }
            BenchOp::Elementwise { rows, width } => {
                let (x, dy) = (tensor(&[rows, width])?, tensor(&[rows, width])?);
                let (scale, shift) = (tensor(&[width])?, tensor(&[width])?);
                Box::new(move || {
                    elementwise::add(&x, &dy)?;
                    activation::forward(ActivationFn::Gelu, &x)?;
                    let (_, statistics) = layer_norm::forward(&x, &scale, &shift, 1e-5)?;
                    layer_norm::backward_input(&dy, &x, &scale, &statistics).map(drop)
                })
            }
            BenchOp::LightElementwise { rows, width } => {
                let (x, y) = (tensor(&[rows, width])?, tensor(&[rows, width])?);
                Box::new(move || {
                    let sum = elementwise::add(&x, &y)?;
                    activation::forward(ActivationFn::Relu, &x)?;
                    activation::backward(ActivationFn::Relu, &x, sum).map(drop)
                })
            }
            BenchOp::Launch => {
                let (x, y) = (tensor(&[16])?, tensor(&[16])?);
                Box::new(move || elementwise::add(&x, &y).map(drop))
            }
        })
    }
}

impl fmt::Display for BenchOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            BenchOp::Linear { rows, input, output } => write!(f, "{rows} x {input} x {output}"),
            BenchOp::Convolution(of) => write!(f, "{of}"),
            BenchOp::ConvolutionPass { of, pass } => {
                let result = match pass {
                    TimedConvPass::Forward => "y",
                    TimedConvPass::Input => "dx",
                    TimedConvPass::Weight => "dw",
                };
                write!(f, "{of}, {result}")
            }
            BenchOp::Sparse { work, kept } => write!(f, "{work}, {:.0} %", 100.0 * kept),
            BenchOp::Attention { batch, positions, heads, width } => {
                write!(f, "{batch} of {positions} x {width}, {heads} heads")
            }
            BenchOp::Elementwise { rows, width } | BenchOp::LightElementwise { rows, width } => {
                write!(f, "{rows} x {width}")
            }
            BenchOp::Launch => write!(f, "16"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_that_a_planner_counts() {
        let linear = BenchOp::Linear { rows: 3, input: 5, output: 7 };
        assert_eq!(linear.size(DType::F32), 210.0);
        let of = ConvolutionSize { batch: 2, side: 7, input: 3, output: 5, kernel: 3, stride: 2 };
        assert_eq!(BenchOp::Convolution(of).size(DType::F32), 2.0 * 2.0 * 16.0 * 3.0 * 5.0 * 9.0);
        for (op, counted) in of.passes() {
            assert_eq!(op.size(DType::F32), counted.flops, "{op}");
        }
        let attention = BenchOp::Attention { batch: 2, positions: 8, heads: 2, width: 4 };
        assert_eq!(attention.size(DType::Bf16), 0.5 * 4.0 * 2.0 * 64.0 * 4.0);
        assert_eq!(BenchOp::Elementwise { rows: 4, width: 8 }.size(DType::Bf16), 2.5 * 64.0);
    }
}
