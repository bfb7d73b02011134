//! Products of a linear layer with a pruned weight that skip its zeros, on a processor, in f32 ([`SparseWeight`]).
//!
//! On a GPU, and in bf16, dense products are faster at the sparsities that pruning reaches: `benches/sparse.py`
//! measures it, `cargo bench -p espalier-tensor --bench sparse` those here.

mod host;
mod panels;
mod sddmm;
mod weight;

pub use weight::SparseWeight;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::tensor::Tensor;

/// Where a matrix has its kept weights, by rows (CSR). Clones share the memory.
#[derive(Debug, Clone)]
struct SparsityPattern {
    rows: usize,
    columns: usize,
    /// u32 `[rows + 1]`: where each row begins among the kept weights; the last says where they end.
    offsets: Tensor,
    /// u32 `[kept]`: the column of each kept weight, ascending in a row. Each is below `columns`.
    col_indices: Tensor,
}

impl SparsityPattern {
    /// Counted as mask. Offsets ascend from 0 to the number of kept weights.
    fn new(device: &Device, columns: usize, offsets: &[u32], col_indices: &[u32]) -> Result<SparsityPattern> {
        if i32::try_from(col_indices.len()).is_err() {
            let what = format!("a sparse matrix has at most {} kept weights, this one has more", i32::MAX);
            return Err(Error::Unsupported { what });
        }
        Ok(SparsityPattern {
            rows: offsets.len() - 1,
            columns,
            offsets: Tensor::from_slice(device, &[offsets.len()], offsets, Category::Mask)?,
            col_indices: Tensor::from_slice(device, &[col_indices.len()], col_indices, Category::Mask)?,
        })
    }
}

#[cfg(test)]
mod tests;
