//! Work whose numbers are zero but for a fraction, and whose kernels on a core skip these.
//!
//! A layer is timed by itself, with its tensors in the caches, as they are in a step that has just written them:
//! a product that skips nine of ten weights has little to hide a cold cache behind, and would look slower than
//! it is in any step.

use std::fmt;

use espalier_tensor::ops::conv::{self, ConvParams};
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Device, Mask, Result, Tensor, random};

use super::layers::{ConvolutionSize, RepeatedLayers, layer_tensors};
use crate::bench::timing::TimedWork;

/// Work whose kernels skip zeros. Convolutions are not padded: `side` counts the windows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SparseWork {
    /// The three products of a linear layer: where all is kept, with dense kernels.
    Linear { rows: usize, width: usize },
    /// The forward pass of a convolution, whose weight has zeros.
    Filters(ConvolutionSize),
    /// Both gradients of a convolution, whose output's gradient has zeros.
    Gradients(ConvolutionSize),
}

impl SparseWork {
    /// Of a pass with nothing skipped.
    pub fn flops(self) -> f64 {
        match self {
            SparseWork::Linear { rows, width } => 2.0 * rows as f64 * (width as f64).powi(2),
            SparseWork::Filters(of) | SparseWork::Gradients(of) => {
                ConvolutionSize { side: of.side * of.stride, ..of }.flops()
            }
        }
    }

    /// Passes that are timed together.
    pub fn pass_count(self) -> f64 {
        match self {
            SparseWork::Linear { .. } => 3.0,
            SparseWork::Filters(_) => 1.0,
            SparseWork::Gradients(_) => 2.0,
        }
    }

    /// All passes, ready to be run again and again.
    pub fn prepare(self, device: &Device, dtype: DType, kept: f64) -> Result<TimedWork> {
        let category = Category::Activations;
        Ok(match self {
            SparseWork::Linear { rows, width } => {
                let shapes = [vec![rows, width], vec![width, width], vec![rows, width]];
                let [x, mut w, dy] = layer_tensors(device, dtype, &shapes)?;
                let is_kept = thin(&mut w, kept);
                let mask = Mask::new(device, is_kept.len(), &mask_words(&is_kept))?;
                let sparse = SparseWeight::new(&mask, [width, width])?;
                RepeatedLayers::single([x, w, dy]).each(move |[x, w, dy]| {
                    Ok(if kept < 1.0 {
                        vec![
                            sparse.product(x, w, true, None, category)?,
                            sparse.product(dy, w, false, None, category)?,
                            sparse.sampled_product(dy, x, category)?,
                        ]
                    } else {
                        vec![
                            matmul(x, w.t(), None, category)?,
                            matmul(dy, w, None, category)?,
                            matmul(dy.t(), x, None, category)?,
                        ]
                    })
                })
            }
            SparseWork::Filters(of) => {
                let ([x, mut w, dy], conv) = unpadded(device, dtype, of)?;
                thin(&mut w, kept);
                let layer = RepeatedLayers::single([x, w, dy]);
                layer.each(move |[x, w, _]| Ok(vec![conv::forward(x, w, None, conv)?]))
            }
            SparseWork::Gradients(of) => {
                let ([x, w, mut dy], conv) = unpadded(device, dtype, of)?;
                thin(&mut dy, kept);
                RepeatedLayers::single([x, w, dy]).each(move |[x, w, dy]| {
                    let of_input = conv::backward_input(dy, w, conv, x.shape())?;
                    Ok(vec![of_input, conv::backward_weight(x, dy, conv)?])
                })
            }
        })
    }
}

/// The tensors of a convolution that is not padded.
fn unpadded(device: &Device, dtype: DType, of: ConvolutionSize) -> Result<([Tensor; 3], ConvParams)> {
    let ConvolutionSize { batch, side, input, output, kernel, stride } = of;
    let seen = (side - 1) * stride + kernel;
    let shapes = [
        vec![batch, seen, seen, input],
        vec![output, kernel, kernel, input],
        vec![batch, side, side, output],
    ];
    let conv = ConvParams { kernel, stride, padding: 0.into() };
    Ok((layer_tensors(device, dtype, &shapes)?, conv))
}

/// As the bits of a mask.
fn mask_words(is_kept: &[bool]) -> Vec<u32> {
    let word = |bits: &[bool]| bits.iter().enumerate().fold(0, |word, (i, bit)| word | u32::from(*bit) << i);
    is_kept.chunks(32).map(word).collect()
}

/// Zeros in the place of all but a fraction of a tensor in the host's memory; which are kept.
fn thin(tensor: &mut Tensor, kept: f64) -> Vec<bool> {
    let key = random::key(5, tensor.len() as u64);
    let is_kept: Vec<bool> = (0..tensor.len() as u64).map(|i| random::uniform(key, i) < kept).collect();
    let numbers = tensor.slice_mut::<f32>().iter_mut().zip(&is_kept);
    numbers.filter(|(_, kept)| !**kept).for_each(|(number, _)| *number = 0.0);
    is_kept
}

impl fmt::Display for SparseWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            SparseWork::Linear { rows, width } => write!(f, "{rows} x {width} x {width}"),
            SparseWork::Filters(of) => write!(f, "{of}, y"),
            SparseWork::Gradients(of) => write!(f, "{of}, dx dw"),
        }
    }
}
