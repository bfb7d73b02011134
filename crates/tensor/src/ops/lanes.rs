//! How the kernels that read `lanes.cuh` are launched: the three mappings of threads to data.
//!
//! Everything follows from shapes, so that sums are split the same way in every run.

use crate::cuda::compile::{Build, KernelInclude, KernelSource};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// Threads of a block that walks over elements.
pub(crate) const THREADS: u32 = 256;
/// Elements of such a block.
pub(crate) const TILE: usize = 4096;

/// A file of kernels that reads `lanes.cuh` and includes nothing else.
pub(crate) const fn source(name: &'static str, text: &'static str, builds: &'static [Build]) -> KernelSource {
    KernelSource { name, includes: &[KernelInclude::LANES], text, exact: false, builds }
}

/// How many blocks cover `n` things, `each` of them in a block.
pub(crate) fn blocks(n: usize, each: usize) -> u32 {
    u32::try_from(n.div_ceil(each)).expect("a grid within the GPU's limits")
}

/// The grid of a kernel over `n` elements; its blocks have [`THREADS`].
pub(crate) fn elements(n: usize) -> u32 {
    blocks(n, TILE)
}

/// Elements that a thread moves at once in rows of `c`.
pub(crate) fn width(c: usize, dtype: DType) -> usize {
    let lanes = 16 / dtype.bytes();
    if c.is_multiple_of(lanes) { lanes } else { 1 }
}

/// Grid and block of a kernel that gives each row `[c]` to a warp, or to a block where the row is long.
pub(crate) fn rows(rows: usize, c: usize, dtype: DType) -> (u32, (u32, u32)) {
    let groups = c / width(c, dtype);
    if groups <= 128 {
        return (blocks(rows, 4), (32, 4));
    }
    let threads = groups.div_ceil(4).next_multiple_of(32).min(512);
    (blocks(rows, 1), (threads as u32, 1))
}

/// How a kernel sums columns: over chunks of rows, whose sums a second kernel adds up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ColumnSumLaunch {
    pub(crate) grid: (u32, u32),
    pub(crate) block: (u32, u32),
    /// Rows of a chunk.
    pub(crate) chunk: usize,
    /// How many chunks there are.
    pub(crate) chunks: usize,
}

/// The geometry of column sums over `[rows, c]`.
pub(crate) fn columns(rows: usize, c: usize, dtype: DType) -> ColumnSumLaunch {
    let width = width(c, dtype);
    let across = (c / width).next_power_of_two().min(32);
    // Enough chunks to fill a GPU, and few enough that their sum is short.
    let chunk = rows.div_ceil(512).max(128);
    let chunks = rows.div_ceil(chunk);
    let grid = (blocks(c, across * width), chunks as u32);
    ColumnSumLaunch { grid, block: (across as u32, THREADS / across as u32), chunk, chunks }
}

/// Memory for `n` doubles. No [`DType`] names them: each takes two u32.
pub(crate) fn doubles(device: &Device, n: usize) -> Result<Tensor> {
    Tensor::empty(device, &[n, 2], DType::U32, Category::Workspace)
}

/// What a kernel adds to its result, and where the sum goes: the same place, if nobody else holds it.
#[derive(Debug)]
pub(crate) struct Addend {
    /// Where what is added lies; 0 for nothing.
    pub(crate) from: u64,
    pub(crate) sum: Tensor,
    /// What is added, where the sum lies elsewhere: it must outlive the launch.
    _plus: Option<Tensor>,
}

impl Addend {
    /// For a result like `like`, to which `plus` is added, or nothing.
    pub(crate) fn new(like: &Tensor, mut plus: Option<Tensor>) -> Result<Addend> {
        assert!(plus.as_ref().is_none_or(|plus| plus.dtype() == like.dtype()), "a sum of two types");
        let from = plus.as_ref().map_or(0, |plus| plus.cuda_buffer().address());
        let sum = match plus.take_if(|plus| plus.is_unique()) {
            Some(element) => element,
            None => like.empty_like(Category::Transient)?,
        };
        Ok(Addend { from, sum, _plus: plus })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, from the head of `lanes.cuh`.
    #[test]
    fn the_geometry_is_what_the_kernels_expect() {
        assert_eq!((elements(0), elements(4096), elements(4097)), (0, 1, 2));
        assert_eq!((width(12, DType::F32), width(12, DType::Bf16), width(16, DType::Bf16)), (4, 1, 8));
        assert_eq!(rows(9, 512, DType::F32), (3, (32, 4)));
        assert_eq!(rows(9, 768, DType::F32), (9, (64, 1)));
        assert_eq!(rows(9, 50_257, DType::Bf16), (9, (512, 1)));
        let ColumnSumLaunch { grid, block, chunk, chunks } = columns(1000, 768, DType::Bf16);
        assert_eq!((grid, block, chunk, chunks), ((3, 8), (32, 8), 128, 8));
        let ColumnSumLaunch { grid, block, chunk, chunks } = columns(1 << 20, 3, DType::F32);
        assert_eq!((grid, block, chunk, chunks), ((1, 512), (4, 64), 2048, 512));
        assert_eq!(columns(0, 3, DType::F32).chunks, 0);
    }
}
