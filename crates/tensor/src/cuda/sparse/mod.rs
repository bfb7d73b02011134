//! NVIDIA's libraries of sparse products, as far as a benchmark needs them: cuSPARSE for matrices whose zeros are
//! anywhere, cuSPARSELt for two zeros in every four.
//!
//! What is made here belongs to one matrix and one thread at a time: descriptions point to the operands of
//! the call.

mod bindings;
mod structured;

use std::ffi::c_void;

use super::Cuda;
use super::buffer::CudaBuffer;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use bindings::{BY_COLUMNS, BY_ROWS, CuSparse, FROM_ZERO, INDEX_32, NOT_TRANSPOSED, Opaque, data_type};
pub(crate) use structured::TwoFourProduct;

/// A matrix by rows on a GPU, as cuSPARSE is told of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceCsr {
    pub rows: usize,
    pub columns: usize,
    pub kept: usize,
    /// Where `rows + 1` offsets stand, of 32 bits each.
    pub offsets: u64,
    /// Where the columns of the kept weights stand.
    pub col_indices: u64,
    /// Where the kept weights stand.
    pub values: u64,
    pub dtype: DType,
}

/// `C = A B` for one sparse A `[m, k]` and any dense B `[k, n]`, C `[m, n]` of A's type; sums in f32.
#[derive(Debug)]
pub(crate) struct SparseProduct {
    algorithm: i32,
    // Dropped in this order: the handle goes last.
    a: MatrixDescriptor,
    b: MatrixDescriptor,
    c: MatrixDescriptor,
    buffer: CudaBuffer,
    handle: CusparseHandle,
    cuda: Cuda,
}

// SAFETY: cuSPARSE's handles belong to no thread; whoever has the product alone may use them.
unsafe impl Send for SparseProduct {}

impl SparseProduct {
    /// Plans with an algorithm, by cuSPARSE's number for it, for dense matrices that lie row after row or
    /// column after column. `b` and `c` are addresses of their sizes, which planning may read.
    ///
    /// # Safety
    /// The addresses of `a` hold what it says for as long as the plan lives, those of `b` and `c` for the call.
    pub(crate) unsafe fn new(
        cuda: &Cuda,
        a: DeviceCsr,
        n: usize,
        by_rows: bool,
        algorithm: i32,
        (b, c): (u64, u64),
    ) -> Result<SparseProduct> {
        cuda.bind()?;
        let handle = CusparseHandle::new(cuda)?;
        let functions = handle.functions;
        let mut product = SparseProduct {
            algorithm,
            a: MatrixDescriptor::sparse(functions, a)?,
            b: MatrixDescriptor::dense(functions, (a.columns, n), by_rows, a.dtype, b)?,
            c: MatrixDescriptor::dense(functions, (a.rows, n), by_rows, a.dtype, c)?,
            buffer: cuda.allocate(0, Category::Workspace)?,
            handle,
            cuda: cuda.clone(),
        };
        let mut bytes = 0usize;
        // SAFETY: all descriptions live; the library writes a number.
        let code = unsafe { product.call(functions.buffer_size, &raw mut bytes) };
        functions.check(code, "asking for a sparse product's scratch space")?;
        // Never nothing: the address must be one.
        product.buffer = cuda.allocate(bytes.max(256), Category::Workspace)?;
        // SAFETY: as before; the buffer has the bytes asked for.
        let code = unsafe { product.call(functions.preprocess, product.buffer.address() as *mut c_void) };
        functions.check(code, "planning a sparse product")?;
        Ok(product)
    }

    /// Queues it.
    ///
    /// # Safety
    /// The addresses hold matrices of the planned sizes, type and order, alive in the order of the compute stream.
    pub(crate) unsafe fn run(&mut self, b: u64, c: u64) -> Result<()> {
        self.cuda.bind()?;
        self.b.point(b)?;
        self.c.point(c)?;
        let functions = self.handle.functions;
        // SAFETY: descriptions and buffer are those that were planned with; operands by the caller's promise.
        let code = unsafe { self.call(functions.product, self.buffer.address() as *mut c_void) };
        functions.check(code, "a sparse product")
    }

    /// # Safety
    /// `last` is what the function takes last.
    unsafe fn call<Last>(&self, function: bindings::SpmmFn<Last>, last: Last) -> i32 {
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: all handles live, the two factors are f32 as the sums are; the rest is the caller's promise.
        unsafe {
            function(
                self.handle.raw,
                NOT_TRANSPOSED,
                NOT_TRANSPOSED,
                (&raw const one).cast(),
                self.a.raw,
                self.b.raw,
                (&raw const zero).cast(),
                self.c.raw,
                data_type(DType::F32),
                self.algorithm,
                last,
            )
        }
    }
}

/// cuSPARSE's handle, on a GPU's compute stream.
#[derive(Debug)]
struct CusparseHandle {
    functions: &'static CuSparse,
    raw: Opaque,
}

impl CusparseHandle {
    fn new(cuda: &Cuda) -> Result<CusparseHandle> {
        let functions = CuSparse::load()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current; the library writes the handle.
        functions.check(unsafe { (functions.create)(&mut raw) }, "starting cuSPARSE")?;
        let handle = CusparseHandle { functions, raw };
        // SAFETY: the stream lives as long as the GPU's handle, which the product keeps.
        let code = unsafe { (functions.set_stream)(raw, cuda.compute().raw().cast()) };
        functions.check(code, "starting cuSPARSE")?;
        Ok(handle)
    }
}

impl Drop for CusparseHandle {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { (self.functions.destroy)(self.raw) };
    }
}

/// What cuSPARSE knows of a matrix.
#[derive(Debug)]
struct MatrixDescriptor {
    functions: &'static CuSparse,
    raw: Opaque,
    sparse: bool,
}

impl MatrixDescriptor {
    fn sparse(functions: &'static CuSparse, a: DeviceCsr) -> Result<MatrixDescriptor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library writes the handle; it keeps the addresses, which the plan's maker vouches for.
        let code = unsafe {
            (functions.create_csr)(
                &mut raw,
                a.rows as i64,
                a.columns as i64,
                a.kept as i64,
                a.offsets as *mut c_void,
                a.col_indices as *mut c_void,
                a.values as *mut c_void,
                INDEX_32,
                INDEX_32,
                FROM_ZERO,
                data_type(a.dtype),
            )
        };
        functions.check(code, "describing a sparse matrix")?;
        Ok(MatrixDescriptor { functions, raw, sparse: true })
    }

    fn dense(
        functions: &'static CuSparse,
        (rows, columns): (usize, usize),
        by_rows: bool,
        dtype: DType,
        at: u64,
    ) -> Result<MatrixDescriptor> {
        let (stride, order) = if by_rows { (columns, BY_ROWS) } else { (rows, BY_COLUMNS) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: as above.
        let code = unsafe {
            (functions.create_dense)(
                &mut raw,
                rows as i64,
                columns as i64,
                stride as i64,
                at as *mut c_void,
                data_type(dtype),
                order,
            )
        };
        functions.check(code, "describing a matrix")?;
        Ok(MatrixDescriptor { functions, raw, sparse: false })
    }

    /// Says where a dense matrix is.
    fn point(&mut self, at: u64) -> Result<()> {
        // SAFETY: the description lives; the address is kept, not read.
        let code = unsafe { (self.functions.set_values)(self.raw, at as *mut c_void) };
        self.functions.check(code, "describing a matrix")
    }
}

impl Drop for MatrixDescriptor {
    fn drop(&mut self) {
        let destroy = if self.sparse { self.functions.destroy_sparse } else { self.functions.destroy_dense };
        // SAFETY: created by one of the two above, destroyed once.
        let _ = unsafe { destroy(self.raw) };
    }
}
