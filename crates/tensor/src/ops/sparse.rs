//! A weight matrix without its zeros, and the product of a linear layer with it: `y = x W^T`.
//!
//! x: [batch, in]; W: [out, in], by rows (CSR: the kept weights of each row, each with its column); y:
//! [batch, out].
//!
//! On a GPU, and in bf16, training does not use this: dense products are faster there at the sparsities that
//! pruning reaches. In f32 on a processor sparse ones are, and a layer may be trained with them
//! ([`SparseWeight`]). `espalier bench sparse` measures both on the machine at hand.

pub mod cuda;
mod host;
mod panels;
mod sddmm;
mod weight;

pub use weight::SparseWeight;

use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::tensor::Tensor;
use crate::with_float;

/// Where a matrix has its kept weights, by rows. Clones share the memory.
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
        Ok(SparsityPattern {
            rows: offsets.len() - 1,
            columns,
            offsets: Tensor::from_slice(device, &[offsets.len()], offsets, Category::Mask)?,
            col_indices: Tensor::from_slice(device, &[col_indices.len()], col_indices, Category::Mask)?,
        })
    }
}

/// The kept weights of a matrix by rows, on its device. Clones share the memory.
#[derive(Debug, Clone)]
pub struct Csr {
    pattern: SparsityPattern,
    /// `[kept]`.
    values: Tensor,
}

impl Csr {
    /// The weights of a dense matrix that are not zero; those are counted as weights, and where they stand as
    /// mask.
    pub fn from_dense(dense: &Tensor) -> Result<Csr> {
        let &[rows, columns] = dense.shape() else {
            panic!("a matrix was expected, got {:?}", dense.shape())
        };
        let device = dense.device();
        let bytes = dense.read_bytes()?;
        with_float!(dense.dtype(), T => {
            let mut offsets = vec![0u32];
            let mut col_indices = Vec::new();
            let mut values = Vec::<T>::new();
            for row in bytes.chunks_exact((columns * size_of::<T>()).max(1)) {
                // A copy from a GPU need not be aligned for its elements.
                let weights = row.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>);
                for (column, weight) in weights.enumerate().filter(|(_, w)| Float::to_f32(*w) != 0.0) {
                    col_indices.push(column as u32);
                    values.push(weight);
                }
                offsets.push(offset(col_indices.len())?);
            }
            // Rows without columns left no bytes to walk over.
            offsets.resize(rows + 1, 0);
            Ok(Csr {
                pattern: SparsityPattern::new(&device, columns, &offsets, &col_indices)?,
                values: Tensor::from_slice(&device, &[values.len()], &values, Category::Weights)?,
            })
        })
    }

    /// Rows: outputs of the layer.
    pub fn rows(&self) -> usize {
        self.pattern.rows
    }

    /// Columns: inputs of the layer.
    pub fn columns(&self) -> usize {
        self.pattern.columns
    }

    pub fn kept(&self) -> usize {
        self.values.len()
    }

    /// The type of the weights.
    pub fn dtype(&self) -> DType {
        self.values.dtype()
    }

    /// The device that holds it.
    pub fn device(&self) -> Device {
        self.values.device()
    }
}

/// Libraries count kept weights in 32 bits with a sign.
fn offset(kept: usize) -> Result<u32> {
    match i32::try_from(kept) {
        Ok(kept) => Ok(kept as u32),
        Err(_) => Err(Error::Unsupported {
            what: format!("a sparse matrix has at most {} kept weights, this one has more", i32::MAX),
        }),
    }
}

/// `x W^T` as a new tensor `[batch, out]` of x's type, which is W's. Sums are in f32, in the order of the columns.
///
/// On a GPU by cuSPARSE, which must be there; see [`cuda::SpmmPlan`] for products that are run more than once.
pub fn matmul(x: &Tensor, w: &Csr, category: Category) -> Result<Tensor> {
    check(x, w);
    match x.device() {
        Device::Cpu(cpu) => {
            let mut y = Tensor::empty(&x.device(), &[x.rows(), w.rows()], x.dtype(), category)?;
            host::matmul(&cpu, x, w, None, &mut y)?;
            Ok(y)
        }
        Device::Cuda(_) => cuda::SpmmPlan::new(w, x.rows(), cuda::SpmmOptions::REPEATABLE)?.run(x, category),
    }
}

fn check(x: &Tensor, w: &Csr) {
    assert_eq!(
        x.width(),
        w.columns(),
        "a product of {:?} and a matrix [{}, {}]^T",
        x.shape(),
        w.rows(),
        w.columns()
    );
    assert_eq!(x.dtype(), w.dtype(), "a product of two types");
}

#[cfg(test)]
mod tests;
