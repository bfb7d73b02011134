//! The product on a GPU, by cuSPARSE: `y^T = W x^T`, with x and y as they lie or transposed on the way; and
//! the product with half of the weights in a fixed pattern, by cuSPARSELt.

use std::fmt;

use super::{Csr, check};
use crate::cuda::sparse::{DeviceCsr, SparseProduct, TwoFourProduct};
use crate::device::{Device, host_only};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::ops::layout;
use crate::tensor::Tensor;

/// How cuSPARSE is asked for a product. Which is the fastest depends on the GPU, the sizes and the library's
/// version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpmmOptions {
    /// One of cuSPARSE's algorithms for matrices by rows.
    pub algorithm: SpmmAlgorithm,
    /// Whether x and y are transposed, so that a kept weight reads a contiguous run: the library is faster
    /// then, and two transposes are added. What lies row after row is else column after column of its
    /// transpose.
    pub transposed: bool,
}

/// cuSPARSE's algorithms, by its names for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpmmAlgorithm {
    /// Its first choice for columns; may round otherwise in each run.
    Csr1,
    /// Its first choice for rows; may round otherwise in each run.
    Csr2,
    /// Repeats bit for bit.
    Csr3,
}

impl SpmmOptions {
    /// What gives the same bits in every run.
    pub(crate) const REPEATABLE: SpmmOptions =
        SpmmOptions { algorithm: SpmmAlgorithm::Csr3, transposed: false };

    /// Every combination, for a benchmark to choose from.
    pub fn all() -> impl Iterator<Item = SpmmOptions> {
        [false, true].into_iter().flat_map(|transposed| {
            let algorithms = [SpmmAlgorithm::Csr1, SpmmAlgorithm::Csr2, SpmmAlgorithm::Csr3];
            algorithms.map(|algorithm| SpmmOptions { algorithm, transposed })
        })
    }
}

impl fmt::Display for SpmmOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithm = match self.algorithm {
            SpmmAlgorithm::Csr1 => "CSR_ALG1",
            SpmmAlgorithm::Csr2 => "CSR_ALG2",
            SpmmAlgorithm::Csr3 => "CSR_ALG3",
        };
        write!(f, "{algorithm}{}", if self.transposed { ", x and y transposed" } else { "" })
    }
}

/// A product of one sparse matrix with x of one size, planned once and run many times.
#[derive(Debug)]
pub struct SpmmPlan {
    /// Nothing where there is nothing to add up.
    product: Option<SparseProduct>,
    w: Csr,
    batch: usize,
    options: SpmmOptions,
}

impl SpmmPlan {
    /// Plans; cuSPARSE must be there, and support the options for the type.
    pub fn new(w: &Csr, batch: usize, options: SpmmOptions) -> Result<SpmmPlan> {
        let Device::Cuda(cuda) = w.device() else { host_only() };
        let mut plan = SpmmPlan { product: None, w: w.clone(), batch, options };
        if batch > 0 && w.kept() > 0 {
            let rows = DeviceCsr {
                rows: w.rows(),
                columns: w.columns(),
                kept: w.kept(),
                offsets: w.pattern.offsets.cuda_buffer().address(),
                col_indices: w.pattern.col_indices.cuda_buffer().address(),
                values: w.values.cuda_buffer().address(),
                dtype: w.dtype(),
            };
            let number = match options.algorithm {
                SpmmAlgorithm::Csr1 => 4,
                SpmmAlgorithm::Csr2 => 6,
                SpmmAlgorithm::Csr3 => 12,
            };
            let example =
                |width: usize| Tensor::zeros(&w.device(), &[batch, width], w.dtype(), Category::Workspace);
            let (x, y) = (example(w.columns())?, example(w.rows())?);
            let examples = (x.cuda_buffer().address(), y.cuda_buffer().address());
            // SAFETY: the plan keeps the matrix; its tensors hold what a `Csr` says, the examples batch x
            // width numbers.
            let product =
                unsafe { SparseProduct::new(&cuda, rows, batch, options.transposed, number, examples) }?;
            plan.product = Some(product);
        }
        Ok(plan)
    }

    /// `x W^T` as a new tensor.
    pub fn run(&mut self, x: &Tensor, category: Category) -> Result<Tensor> {
        check(x, &self.w);
        assert_eq!(x.rows(), self.batch, "a product that was planned for another batch");
        let (device, rows, columns) = (x.device(), self.w.rows(), self.w.columns());
        let Some(product) = &mut self.product else {
            return Tensor::zeros(&device, &[self.batch, rows], x.dtype(), category);
        };
        let x = if self.options.transposed { transposed(x, self.batch, columns)? } else { x.clone() };
        let y_category = if self.options.transposed { Category::Workspace } else { category };
        let mut y = Tensor::empty(&device, &[self.batch, rows], x.dtype(), y_category)?;
        // SAFETY: x and y are batch x columns and batch x rows, in the planned order.
        unsafe { product.run(x.cuda_buffer().address(), y.cuda_buffer_mut().address())? };
        if self.options.transposed {
            y = transposed(&y, rows, self.batch)?.reshape(&[self.batch, rows]);
            if y.is_unique() {
                y.tag_memory(category);
            }
        }
        Ok(y)
    }
}

/// A matrix `[rows, columns]` as `[columns, rows]`.
fn transposed(x: &Tensor, rows: usize, columns: usize) -> Result<Tensor> {
    layout::flatten(&x.clone().reshape(&[1, rows, 1, columns]))
}

/// The product with a matrix in bf16 of which two in every four neighbours of a row are zero (2:4), by cuSPARSELt.
#[derive(Debug)]
pub struct TwoFour {
    product: TwoFourProduct,
    batch: usize,
    rows: usize,
    columns: usize,
}

impl TwoFour {
    /// Compresses a dense W `[out, in]`; what it has beyond two in four is lost. The GPU must have the
    /// pattern, and cuSPARSELt be there.
    pub fn new(w: &Tensor, batch: usize) -> Result<TwoFour> {
        let &[rows, columns] = w.shape() else { panic!("a matrix was expected, got {:?}", w.shape()) };
        let Device::Cuda(cuda) = w.device() else { host_only() };
        if w.dtype() != DType::Bf16 {
            let what =
                "the 2:4 pattern takes bf16; f32 would be rounded to TF32 and not be compared fairly".into();
            return Err(Error::Unsupported { what });
        }
        if [rows, columns, batch].iter().any(|n| *n == 0 || !n.is_multiple_of(16)) {
            let what = format!("the 2:4 pattern takes multiples of 16, not {batch} x {columns} x {rows}");
            return Err(Error::Unsupported { what });
        }
        let example =
            |width: usize| Tensor::zeros(&w.device(), &[batch, width], w.dtype(), Category::Workspace);
        let (x, y) = (example(columns)?, example(rows)?);
        let examples = (x.cuda_buffer().address(), y.cuda_buffer().address());
        let sizes = (rows, batch, columns);
        // SAFETY: tensors of these sizes, all bf16 and alive in the stream's order.
        let product = unsafe { TwoFourProduct::new(&cuda, sizes, w.cuda_buffer().address(), examples) }?;
        Ok(TwoFour { product, batch, rows, columns })
    }

    /// `x W^T` as a new tensor.
    pub fn run(&mut self, x: &Tensor, category: Category) -> Result<Tensor> {
        assert_eq!(
            (x.rows(), x.width()),
            (self.batch, self.columns),
            "a product that was planned for another x"
        );
        assert_eq!(x.dtype(), DType::Bf16, "a product of two types");
        let mut y = Tensor::empty(&x.device(), &[self.batch, self.rows], x.dtype(), category)?;
        // SAFETY: x and y have the planned sizes.
        unsafe { self.product.run(x.cuda_buffer().address(), y.cuda_buffer_mut().address())? };
        Ok(y)
    }
}
