//! Which elements of a longer vector are here: runs of them, in order. What follows from an element's index
//! alone, a random number say, is made of these for the shard that a rank has.

use std::ops::Range;

use crate::cuda::Cuda;
use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// Runs of elements of a vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexRuns {
    /// Of each run, in order: the position of its first element here, and its index in the vector.
    runs: Vec<(usize, usize)>,
    len: usize,
}

impl IndexRuns {
    /// So many elements from the first on.
    pub fn full(len: usize) -> IndexRuns {
        IndexRuns::new([(0, len)])
    }

    /// Runs, each its first index in the vector and how many elements it has.
    pub fn new(runs: impl IntoIterator<Item = (usize, usize)>) -> IndexRuns {
        let mut len = 0;
        let at = |(first, length)| {
            let start = len;
            len += length;
            (start, first)
        };
        let runs = runs.into_iter().map(at).collect();
        IndexRuns { runs, len }
    }

    /// How many elements are here.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The indices of some of the elements here.
    pub(crate) fn indices(&self, at: Range<usize>) -> impl Iterator<Item = u64> {
        // The last run that begins at or before the first element.
        let mut run = self.runs.partition_point(|(start, _)| *start <= at.start).saturating_sub(1);
        at.map(move |i| {
            while self.runs.get(run + 1).is_some_and(|(start, _)| *start <= i) {
                run += 1;
            }
            let (start, first) = self.runs[run];
            (first + i - start) as u64
        })
    }

    /// The same on a GPU, for `run_index` of random.cuh: u64 `[runs, 2]`.
    pub(crate) fn table(&self, cuda: &Cuda) -> Result<Tensor> {
        // Pairs of words, each pair a number.
        let words = |number: usize| [number as u32, (number as u64 >> 32) as u32];
        let table = self.runs.iter().flat_map(|(start, first)| [words(*start), words(*first)].concat());
        let table: Vec<u32> = table.collect();
        Tensor::from_slice(&Device::Cuda(cuda.clone()), &[table.len()], &table, Category::Workspace)
    }

    /// How many rows the table has.
    pub(crate) fn rows(&self) -> usize {
        self.runs.len()
    }
}
