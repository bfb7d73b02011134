//! Products with a matrix of which two in every four neighbours of a row are zero, by cuSPARSELt: the pattern
//! that GPUs from compute capability 8.0 on multiply twice as fast as a dense one.

use std::ffi::c_void;

use super::bindings::{
    ALIGNMENT, BY_COLUMNS, BY_ROWS, CuSparseLt, HALF, NOT_TRANSPOSED, OpaqueStorage, SUMS_IN_F32, TRANSPOSED,
    data_type,
};
use crate::cuda::Cuda;
use crate::cuda::buffer::CudaBuffer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Category;

/// The first version whose functions are those that we bind, as the library numbers itself: 0.6.0.
const OLDEST: i32 = 600;

/// `y = x A^T` in bf16 for one A `[m, k]` with two zeros in every four, x `[n, k]`, y `[n, m]`.
#[derive(Debug)]
pub(crate) struct TwoFourProduct {
    // Dropped in this order: the handle goes last.
    plan: CusparseLtObject,
    // The plan refers to these.
    _operation: Box<OpaqueStorage>,
    _algorithm: Box<OpaqueStorage>,
    _matrices: [CusparseLtObject; 3],
    compressed: CudaBuffer,
    workspace: CudaBuffer,
    handle: CusparseLtHandle,
    cuda: Cuda,
}

// SAFETY: cuSPARSELt's handles belong to no thread; whoever has the product alone may use them.
unsafe impl Send for TwoFourProduct {}

impl TwoFourProduct {
    /// Compresses A and lets the library search for its fastest algorithm, with `x` and `y` as tensors of
    /// their sizes.
    ///
    /// # Safety
    /// The addresses hold bf16 matrices of these sizes, alive in the order of the compute stream.
    pub(crate) unsafe fn new(
        cuda: &Cuda,
        (m, n, k): (usize, usize, usize),
        a: u64,
        (x, y): (u64, u64),
    ) -> Result<TwoFourProduct> {
        if cuda.gpu().capability < 80 {
            let what = format!("{} cannot multiply the 2:4 pattern (GPUs since 8.0 can)", cuda.gpu());
            return Err(Error::Unsupported { what });
        }
        cuda.bind()?;
        let handle = CusparseLtHandle::new()?;
        let (lt, h) = (handle.functions, &raw const *handle.raw);
        let (m, n, k, bf16) = (m as i64, n as i64, k as i64, data_type(DType::Bf16));
        const DESCRIBING: &str = "describing a product of the 2:4 pattern";

        let make = |code: i32, storage: Box<OpaqueStorage>, destroy| -> Result<CusparseLtObject> {
            lt.check(code, DESCRIBING)?;
            Ok(CusparseLtObject { storage, destroy })
        };
        let (mut a_storage, mut b_storage, mut c_storage) =
            (OpaqueStorage::new(), OpaqueStorage::new(), OpaqueStorage::new());
        // SAFETY: the library fills storage that is larger than what it keeps in it, here and below.
        let code = unsafe { (lt.structured)(h, &mut *a_storage, m, k, k, ALIGNMENT, bf16, BY_ROWS, HALF) };
        let a_matrix = make(code, a_storage, lt.destroy_matrix)?;
        // SAFETY: as above.
        let code = unsafe { (lt.dense)(h, &mut *b_storage, n, k, k, ALIGNMENT, bf16, BY_ROWS) };
        let b_matrix = make(code, b_storage, lt.destroy_matrix)?;
        // What is y row after row is y^T column after column.
        // SAFETY: as above.
        let code = unsafe { (lt.dense)(h, &mut *c_storage, m, n, m, ALIGNMENT, bf16, BY_COLUMNS) };
        let c_matrix = make(code, c_storage, lt.destroy_matrix)?;

        let (mut operation, mut algorithm, mut plan) =
            (OpaqueStorage::new(), OpaqueStorage::new(), OpaqueStorage::new());
        let (ra, rb, rc) =
            (&raw const *a_matrix.storage, &raw const *b_matrix.storage, &raw const *c_matrix.storage);
        // SAFETY: as above; all descriptions live.
        let code = unsafe {
            (lt.operation)(h, &mut *operation, NOT_TRANSPOSED, TRANSPOSED, ra, rb, rc, rc, SUMS_IN_F32)
        };
        lt.check(code, DESCRIBING)?;
        // SAFETY: as above.
        lt.check(unsafe { (lt.algorithm)(h, &mut *algorithm, &*operation, 0) }, DESCRIBING)?;
        // SAFETY: as above.
        let code = unsafe { (lt.plan)(h, &mut *plan, &*operation, &*algorithm) };
        let plan = make(code, plan, lt.destroy_plan)?;

        let mut product = TwoFourProduct {
            plan,
            _operation: operation,
            _algorithm: algorithm,
            _matrices: [a_matrix, b_matrix, c_matrix],
            compressed: cuda.allocate(0, Category::Weights)?,
            workspace: cuda.allocate(0, Category::Workspace)?,
            handle,
            cuda: cuda.clone(),
        };
        // SAFETY: the caller's addresses.
        unsafe {
            product.compress(a)?;
            product.search(x, y)?;
        }
        Ok(product)
    }

    /// # Safety
    /// The address holds A.
    unsafe fn compress(&mut self, a: u64) -> Result<()> {
        let (lt, h, plan) =
            (self.handle.functions, &raw const *self.handle.raw, &raw const *self.plan.storage);
        let (mut bytes, mut scratch) = (0, 0);
        // SAFETY: the plan lives; the library writes two numbers.
        let code = unsafe { (lt.compressed_size)(h, plan, &mut bytes, &mut scratch) };
        lt.check(code, "asking for the size of a compressed matrix")?;
        self.compressed = self.cuda.allocate(bytes.max(256), Category::Weights)?;
        let scratch = self.cuda.allocate(scratch.max(256), Category::Workspace)?;
        let stream = self.cuda.compute().raw().cast();
        let (to, scratch) = (self.compressed.address() as *mut c_void, scratch.address() as *mut c_void);
        // SAFETY: the buffers have the bytes asked for, and A is the caller's.
        let code = unsafe { (lt.compress)(h, plan, a as *const c_void, to, scratch, stream) };
        lt.check(code, "compressing a matrix")
    }

    /// # Safety
    /// As [`TwoFourProduct::run`].
    unsafe fn search(&mut self, x: u64, y: u64) -> Result<()> {
        let (lt, h) = (self.handle.functions, &raw const *self.handle.raw);
        let (one, zero) = (1.0f32, 0.0f32);
        let mut streams = [self.cuda.compute().raw().cast::<c_void>()];
        let plan = &raw mut *self.plan.storage;
        // SAFETY: as in `run`; the library finds scratch space for its trials.
        let code = unsafe {
            (lt.search)(
                h,
                plan,
                (&raw const one).cast(),
                self.compressed.address() as *const c_void,
                x as *const c_void,
                (&raw const zero).cast(),
                y as *const c_void,
                y as *mut c_void,
                std::ptr::null_mut(),
                streams.as_mut_ptr(),
                1,
            )
        };
        lt.check(code, "searching for the fastest product of the 2:4 pattern")?;
        let mut bytes = 0;
        // SAFETY: the plan lives; the library writes a number.
        lt.check(unsafe { (lt.workspace)(h, plan, &mut bytes) }, "asking for a product's scratch space")?;
        self.workspace = self.cuda.allocate(bytes.max(256), Category::Workspace)?;
        Ok(())
    }

    /// Queues it.
    ///
    /// # Safety
    /// The addresses hold x and y of the planned sizes in bf16, alive in the order of the compute stream.
    pub(crate) unsafe fn run(&mut self, x: u64, y: u64) -> Result<()> {
        self.cuda.bind()?;
        let (lt, h) = (self.handle.functions, &raw const *self.handle.raw);
        let (one, zero) = (1.0f32, 0.0f32);
        let mut streams = [self.cuda.compute().raw().cast::<c_void>()];
        // SAFETY: the plan and its buffers live; x and y by the caller's promise.
        let code = unsafe {
            (lt.product)(
                h,
                &*self.plan.storage,
                (&raw const one).cast(),
                self.compressed.address() as *const c_void,
                x as *const c_void,
                (&raw const zero).cast(),
                y as *const c_void,
                y as *mut c_void,
                self.workspace.address() as *mut c_void,
                streams.as_mut_ptr(),
                1,
            )
        };
        lt.check(code, "a product of the 2:4 pattern")
    }
}

#[derive(Debug)]
struct CusparseLtHandle {
    functions: &'static CuSparseLt,
    raw: Box<OpaqueStorage>,
}

impl CusparseLtHandle {
    fn new() -> Result<CusparseLtHandle> {
        let functions = CuSparseLt::load()?;
        let mut raw = OpaqueStorage::new();
        // SAFETY: a context is current; the library fills the storage.
        functions.check(unsafe { (functions.init)(&mut *raw) }, "starting cuSPARSELt")?;
        let handle = CusparseLtHandle { functions, raw };
        let mut version = 0;
        // SAFETY: the handle is started; the library writes a number.
        let code = unsafe { (functions.version)(&*handle.raw, &mut version) };
        functions.check(code, "asking cuSPARSELt for its version")?;
        if version < OLDEST {
            let what = format!("cuSPARSELt {version} is too old; install version 0.6 or newer");
            return Err(Error::Unsupported { what });
        }
        Ok(handle)
    }
}

impl Drop for CusparseLtHandle {
    fn drop(&mut self) {
        // SAFETY: started by `new`, ended once.
        let _ = unsafe { (self.functions.destroy)(&*self.raw) };
    }
}

/// A description or a plan, and what ends it.
#[derive(Debug)]
struct CusparseLtObject {
    storage: Box<OpaqueStorage>,
    destroy: unsafe extern "C" fn(*const OpaqueStorage) -> i32,
}

impl Drop for CusparseLtObject {
    fn drop(&mut self) {
        // SAFETY: made by the library, ended once.
        let _ = unsafe { (self.destroy)(&*self.storage) };
    }
}
