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
use super::status::{CheckStatus, destroyed_by};
use super::{Cuda, library};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use plan::MatmulPlan;
pub(crate) use plan::{EpilogueKind, MatmulKey};

/// Settings of a GPU's products.
impl Cuda {
    /// Lets f32 products round their operands to TF32 (10 bits of precision): several times faster. Off at first.
    pub fn allow_tf32(&self, allow: bool) -> Result<()> {
        self.with_blas(|blas| {
            blas.tf32 = allow;
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
    pub a: u64,
    pub b: u64,
    pub c: u64,
    /// A matrix like `c`, which is added in its place.
    pub plus: Option<u64>,
    /// A bias.
    pub vector: Option<u64>,
    /// What stands before an activation, which is written.
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
    handle: CublasHandle,
}

impl Blas {
    pub(super) fn new(cuda: &Cuda) -> Result<Blas> {
        library::cublas_lt()?;
        let handle = CublasHandle::new()?;
        // What NVIDIA advises: Hopper's kernels keep more of a split product there.
        let workspace_bytes = if cuda.gpu().capability >= 90 { 32 << 20 } else { 4 << 20 };
        let workspace = CudaBlock::new(cuda, workspace_bytes, Category::Workspace)?;
        Ok(Blas { plans: HashMap::new(), workspace, workspace_bytes, tf32: false, handle })
    }

    /// Whether products may use TF32.
    pub(super) fn allows_tf32(&self) -> bool {
        self.tf32
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
                Some(plan) => self.queue(cuda, plan, call).map(|()| true),
                None => Ok(false),
            };
        }
        let mut plan = MatmulPlan::new(self.handle.0, &key, tf32, self.workspace_bytes)?;
        // What the library offers it may still refuse to run; nothing is queued then.
        let ran = loop {
            let Some(some) = &mut plan else { break false };
            match self.queue(cuda, some, call) {
                Ok(()) => break true,
                Err(_) if some.drop_best() => {}
                Err(e) if key.kind == EpilogueKind::Plain => return Err(e),
                Err(_) => plan = None,
            }
        };
        self.plans.insert((key, tf32), plan);
        Ok(ran)
    }

    /// Queues a call that [`Blas::run`] was given.
    fn queue(&self, cuda: &Cuda, plan: &MatmulPlan, call: &MatmulCall) -> Result<()> {
        plan.point(call.vector, call.matrix)?;
        let MatmulCall { key, a, b, c, plus, .. } = *call;
        let (alpha, beta) = (1.0f32, if key.accumulate { 1.0f32 } else { 0.0 });
        let flops = 2.0 * (key.m * key.n) as f64 * key.k as f64;
        let timer = cuda.time("products", flops)?;
        // SAFETY: the plan's layouts are those of the call's matrices, as whoever called `run` has promised;
        // the scratch space belongs to this handle, whose work is all on one stream.
        unsafe {
            sys::cublasLtMatmul(
                self.handle.0,
                plan.operation.0,
                (&raw const alpha).cast(),
                b as *const _,
                plan.first.0,
                a as *const _,
                plan.second.0,
                (&raw const beta).cast(),
                plus.unwrap_or(c) as *const _,
                plan.result.0,
                c as *mut _,
                plan.result.0,
                &plan.algorithms[0],
                self.workspace.address() as *mut _,
                self.workspace_bytes,
                cuda.compute().raw().cast(),
            )
        }
        .check("a matrix product")?;
        timer.end()
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

destroyed_by!(CublasHandle, sys::cublasLtDestroy);
