//! Matrix products by cuBLASLt, of matrices that are known by their addresses; `ops::matmul` gives it tensors.
//!
//! `a: [m, k]`, `b: [k, n]`, `c: [m, n]`, row after row. cuBLASLt thinks in columns, and what is `c` by rows is
//! its transpose by columns: so it is asked for `c^T = b^T a^T`, and our `b` is its first operand. Its bias,
//! one number per row of its result, is then one per column of ours.
//!
//! Sums are in f32. The library's own ranking picks the algorithm, never a measurement, unless asked; sums
//! over chunks of `k` are joined in a fixed order. So a product repeats bit for bit.

mod plan;

use std::collections::HashMap;

use cudarc::cublaslt::sys::{self, cublasLtHandle_t};

use super::buffer::CudaBlock;
use super::status::CheckStatus;
use super::{Cuda, library};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use plan::MatmulPlan;
pub(crate) use plan::{EpilogueKind, MatmulKey};

/// How an algorithm is picked among those that cuBLASLt offers for a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AlgorithmSearch {
    /// The one it ranks first: the same in every run.
    #[default]
    Ranked,
    /// The fastest of a few, measured at the product's first use: another run may pick another one, whose sums
    /// round otherwise.
    Timed,
}

/// Settings of a GPU's products.
impl Cuda {
    /// Lets f32 products round their operands to TF32 (10 bits of precision): several times faster. Off at first.
    pub fn allow_tf32(&self, allow: bool) -> Result<()> {
        self.with_blas(|blas| {
            blas.tf32 = allow;
            Ok(())
        })
    }

    /// How algorithms are picked from now on.
    pub fn search_products(&self, search: AlgorithmSearch) -> Result<()> {
        self.with_blas(|blas| {
            if blas.search != search {
                blas.plans.clear();
            }
            blas.search = search;
            Ok(())
        })
    }

    /// The products seen so far for which cuBLASLt had no algorithm, so that kernels of ours finished them.
    pub fn unfused_products(&self) -> Result<Vec<String>> {
        self.with_blas(|blas| {
            let unfused = blas.plans.iter().filter(|(_, plan)| plan.is_none());
            let mut unfused: Vec<_> = unfused.map(|((key, _), _)| key.to_string()).collect();
            unfused.sort();
            Ok(unfused)
        })
    }
}

/// A product as cuBLASLt is asked for it: what tells it from others, and the addresses of what it reads and
/// writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatmulCall {
    pub key: MatmulKey,
    /// The product is multiplied by it, before anything is added.
    pub scale: f32,
    pub a: u64,
    pub b: u64,
    pub c: u64,
    /// A matrix like `c`, which is added in its place.
    pub plus: Option<u64>,
    /// A bias that is read, or sums that are written.
    pub vector: Option<u64>,
    /// What stands before an activation, written or read.
    pub matrix: Option<u64>,
}

/// A GPU's cuBLASLt: its handle, its scratch space, and a plan for every product seen.
#[derive(Debug)]
pub(crate) struct Blas {
    /// By product, and whether it may use TF32. `None`: cuBLASLt has no algorithm for it.
    plans: HashMap<(MatmulKey, bool), Option<MatmulPlan>>,
    workspace: CudaBlock,
    workspace_bytes: usize,
    tf32: bool,
    search: AlgorithmSearch,
    handle: CublasHandle,
}

impl Blas {
    pub(super) fn new(cuda: &Cuda) -> Result<Blas> {
        library::cublas_lt()?;
        let handle = CublasHandle::new()?;
        // What NVIDIA advises: Hopper's kernels keep more of a split product there.
        let workspace_bytes = if cuda.gpu().capability >= 90 { 32 << 20 } else { 4 << 20 };
        let workspace = CudaBlock::new(cuda, workspace_bytes, Category::Workspace)?;
        Ok(Blas {
            plans: HashMap::new(),
            workspace,
            workspace_bytes,
            tf32: false,
            search: AlgorithmSearch::Ranked,
            handle,
        })
    }

    /// Whether products may use TF32, and how algorithms are picked.
    pub(super) fn settings(&self) -> (bool, AlgorithmSearch) {
        (self.tf32, self.search)
    }

    /// Whether it ran; `false` where cuBLASLt cannot do it.
    ///
    /// # Safety
    /// At the call's addresses are matrices of the sizes and types that its key says, and they stay alive
    /// in the stream's order.
    pub(crate) unsafe fn run(&mut self, cuda: &Cuda, call: &MatmulCall) -> Result<bool> {
        let key = call.key;
        if !key.possible() {
            return Ok(false);
        }
        let tf32 = self.tf32 && key.input == DType::F32;
        if let Some(known) = self.plans.get(&(key, tf32)) {
            return match known {
                Some(plan) => self.queue(cuda, plan, plan.best(), call, None).map(|()| true),
                None => Ok(false),
            };
        }
        let mut plan = MatmulPlan::new(self.handle.0, &key, tf32, self.workspace_bytes)?;
        if let (Some(plan), AlgorithmSearch::Timed) = (&mut plan, self.search) {
            self.fastest(cuda, plan, call)?;
        }
        // What the library offers it may still refuse to run; nothing is queued then.
        let ran = loop {
            let Some(some) = &mut plan else { break false };
            match self.queue(cuda, some, some.best(), call, None) {
                Ok(()) => break true,
                Err(_) if some.drop_best() => {}
                Err(e) if key.kind == EpilogueKind::Plain => return Err(e),
                Err(_) => plan = None,
            }
        };
        self.plans.insert((key, tf32), plan);
        Ok(ran)
    }

    /// Queues a call that [`Blas::run`] was given. `elsewhere`: where the result goes instead of `c`, which
    /// is then only read, if at all.
    fn queue(
        &self,
        cuda: &Cuda,
        plan: &MatmulPlan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        call: &MatmulCall,
        elsewhere: Option<u64>,
    ) -> Result<()> {
        plan.point(call.vector, call.matrix)?;
        let MatmulCall { key, scale, a, b, .. } = call;
        let d = elsewhere.unwrap_or(call.c);
        let c = call.plus.unwrap_or(call.c);
        let beta = if key.accumulate { 1.0f32 } else { 0.0 };
        let flops = 2.0 * (key.batch * key.m * key.n) as f64 * key.k as f64;
        let timer = cuda.time("products", flops)?;
        // SAFETY: the plan's layouts are those of the call's matrices, as whoever called `run` has promised;
        // the scratch space belongs to this handle, whose work is all on one stream.
        unsafe {
            sys::cublasLtMatmul(
                self.handle.0,
                plan.operation(),
                (&raw const *scale).cast(),
                *b as *const _,
                plan.first(),
                *a as *const _,
                plan.second(),
                (&raw const beta).cast(),
                c as *const _,
                plan.result(),
                d as *mut _,
                plan.result(),
                algorithm,
                self.workspace.address() as *mut _,
                self.workspace_bytes,
                cuda.compute().raw().cast(),
            )
        }
        .check("a matrix product")?;
        timer.end()
    }

    /// Puts the fastest of a plan's algorithms first. What is measured is the very product, once to warm up and
    /// then a few times; where it adds to `c`, the sum goes elsewhere.
    fn fastest(&self, cuda: &Cuda, plan: &mut MatmulPlan, call: &MatmulCall) -> Result<()> {
        const TIMES: u32 = 4;
        let MatmulKey { batch, m, n, output, .. } = call.key;
        let elsewhere = match call.key.accumulate && call.plus.is_none() {
            true => Some(cuda.allocate(batch * m * n * output.bytes(), Category::Workspace)?),
            false => None,
        };
        let address = elsewhere.as_ref().map(|buffer| buffer.address());
        let mut best = (0, std::time::Duration::MAX);
        for i in 0..plan.algorithms() {
            let algorithm = *plan.algorithm(i);
            if self.queue(cuda, plan, &algorithm, call, address).is_err() {
                continue;
            }
            cuda.compute().synchronize()?;
            let start = std::time::Instant::now();
            for _ in 0..TIMES {
                self.queue(cuda, plan, &algorithm, call, address)?;
            }
            cuda.compute().synchronize()?;
            if start.elapsed() < best.1 {
                best = (i, start.elapsed());
            }
        }
        plan.prefer(best.0);
        Ok(())
    }
}

#[derive(Debug)]
struct CublasHandle(cublasLtHandle_t);

// SAFETY: cuBLASLt's handle may be used from any thread.
unsafe impl Send for CublasHandle {}

impl CublasHandle {
    fn new() -> Result<CublasHandle> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is loaded and a context current; it writes the handle.
        unsafe { sys::cublasLtCreate(&mut handle) }.check("starting cuBLASLt")?;
        Ok(CublasHandle(handle))
    }
}

impl Drop for CublasHandle {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { sys::cublasLtDestroy(self.0) };
    }
}
