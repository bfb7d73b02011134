//! Zeros that kernels of a core skip: the same work timed with them and without, in turns.
//!
//! A layer is timed by itself, with its tensors in the caches, as they are in a step that has just written them:
//! a product that skips nine of ten weights has little to hide a cold cache behind, and would look slower than
//! it is in any step.

use std::fmt;

use anyhow::Result;
use espalier_plan::cluster::SkippedZeros;
use espalier_plan::cluster::measured::rounded;
use espalier_tensor::ops::conv::{self, ConvParams};
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Device, Mask, Tensor, random};

use super::op::{BenchOp, ConvolutionSize, RepeatedLayers, layer_tensors};
use super::{BenchDevices, ComputeRow};
use crate::bench::timing::TimedWork;

/// What is timed.
pub struct SparseSizes {
    /// Rows and width of square linear layers.
    pub linear: &'static [[usize; 2]],
    pub convolutions: &'static [ConvolutionSize],
    /// Fractions that are kept of their weights, in ascending order, up to the most with which zeros are skipped.
    pub of_linear: &'static [f64],
    pub of_filters: &'static [f64],
}

/// The fraction of a gradient that is not zero behind a ReLU and a max pool of 2 x 2, or a little more.
const BEHIND_POOL: f64 = 0.2;

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
    /// With nothing skipped, as large.
    pub fn dense(self) -> BenchOp {
        match self {
            SparseWork::Linear { rows, width } => BenchOp::Linear { rows, input: width, output: width },
            SparseWork::Filters(of) | SparseWork::Gradients(of) => {
                BenchOp::Convolution(ConvolutionSize { side: of.side * of.stride, ..of })
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
    pub fn prepare(self, device: &Device, dtype: DType, kept: f64) -> espalier_tensor::Result<TimedWork> {
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

impl BenchDevices {
    /// What skipping zeros saves. What was seen goes to `rows`.
    pub(super) fn skipped_zeros(&self, of: &SparseSizes, rows: &mut Vec<ComputeRow>) -> Result<SkippedZeros> {
        let linear = of.linear.iter().map(|[rows, width]| SparseWork::Linear { rows: *rows, width: *width });
        let filters = of.convolutions.iter().copied().map(SparseWork::Filters);
        let gradients = of.convolutions.iter().copied().map(SparseWork::Gradients);
        Ok(SkippedZeros {
            linear: self.times_as_fast(linear, of.of_linear, rows)?,
            convolution: self.times_as_fast(filters, of.of_filters, rows)?,
            behind_pool: self.times_as_fast(gradients, &[BEHIND_POOL], rows)?[0][1],
        })
    }

    /// How many times as fast some work is with such fractions kept as without zeros: the mean of logarithms.
    fn times_as_fast(
        &self,
        works: impl ExactSizeIterator<Item = SparseWork>,
        kept: &[f64],
        rows: &mut Vec<ComputeRow>,
    ) -> Result<Vec<[f64; 2]>> {
        let (count, mut logarithms) = (works.len() as f64, vec![0.0; kept.len()]);
        for work in works {
            let asked: Vec<BenchOp> =
                [1.0].iter().chain(kept).map(|kept| BenchOp::Sparse { work, kept: *kept }).collect();
            let timed = self.time(&asked, "f32", DType::F32)?;
            let (dense, sparse) = timed.split_first().expect("the dense form is the first");
            let faster = |row: &ComputeRow| (dense.busy.seconds / row.busy.seconds).ln();
            logarithms.iter_mut().zip(sparse).for_each(|(sum, row)| *sum += faster(row));
            rows.extend(timed);
        }
        Ok(kept.iter().zip(logarithms).map(|(kept, sum)| [*kept, rounded((sum / count).exp())]).collect())
    }
}

/// What was found, in a line.
pub fn in_words(sparse: &SkippedZeros) -> String {
    let each = |points: &[[f64; 2]]| {
        let each = points.iter().map(|[kept, times]| format!("{times:.2}x with {:.0} % kept", 100.0 * kept));
        each.collect::<Vec<_>>().join(", ")
    };
    format!(
        "     skipping zeros: linear layers {}; forward convolutions {}; gradients of convolutions behind a max pool {:.2}x\n",
        each(&sparse.linear),
        each(&sparse.convolution),
        sparse.behind_pool
    )
}

/// The tensors of a convolution that is not padded.
fn unpadded(
    device: &Device,
    dtype: DType,
    of: ConvolutionSize,
) -> espalier_tensor::Result<([Tensor; 3], ConvParams)> {
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
            SparseWork::Filters(of) => write!(f, "{}, y", BenchOp::Convolution(of)),
            SparseWork::Gradients(of) => write!(f, "{}, dx dw", BenchOp::Convolution(of)),
        }
    }
}
