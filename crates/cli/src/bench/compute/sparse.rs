//! What a core saves by skipping zeros: the same work timed with them and without, in turns.

use anyhow::Result;
use espalier_plan::cluster::SkippedZeros;
use espalier_plan::cluster::measured::rounded;
use espalier_tensor::DType;

use super::layers::ConvolutionSize;
use super::op::BenchOp;
use super::sparse_work::SparseWork;
use super::{BenchDevices, ComputeRow};

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
