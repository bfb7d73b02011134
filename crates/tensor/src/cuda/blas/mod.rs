//! Matrix products by cuBLASLt, with what follows them done on the way out.
//!
//! `a: [m, k]`, `b: [k, n]`, `c: [m, n]`, row after row. cuBLASLt thinks in columns, and what is `c` by rows is
//! its transpose by columns: so it is asked for `c^T = b^T a^T`, and our `b` is its first operand. Its bias,
//! one number per row of its result, is then one per column of ours.
//!
//! Sums are in f32. The library's own ranking picks the algorithm, never a measurement, unless asked; sums over
//! parts of `k` are joined in a fixed order. So a product repeats bit for bit.

mod fallback;
mod plan;

use std::collections::HashMap;

use cudarc::cublaslt::sys::{self, cublasLtHandle_t};

use super::buffer::Block;
use super::compile::{Build, Source};
use super::status::Status;
use super::{Cuda, library};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::operand::Operand;
use crate::tensor::Tensor;
use plan::{Key, Kind, Plan};

/// The kernels that stand in where cuBLASLt has none.
pub const EPILOGUE: Source = Source {
    name: "epilogue.cu",
    parts: &[],
    text: include_str!("epilogue.cu"),
    exact: false,
    builds: Build::FLOATS,
};

/// What happens to a finished sum on its way to `c`. Each tensor has `c`'s type.
#[derive(Debug)]
pub enum Epilogue<'a> {
    /// Nothing.
    None,
    /// `c = a b + bias`; `bias: [n]`.
    Bias(&'a Tensor),
    /// `pre = a b + bias`, `c = gelu(pre)`, GELU in GPT-2's form; `pre: [m, n]`.
    Gelu {
        /// `[n]`.
        bias: Option<&'a Tensor>,
        /// Kept for the backward pass.
        pre: &'a mut Tensor,
    },
    /// `c = (a b) * gelu'(pre)`.
    GeluBackward {
        /// What [`Epilogue::Gelu`] kept.
        pre: &'a Tensor,
    },
    /// `c = a b`, and the sums of `a` over `k` beside it: `[m]`. A bias's gradient where `a` is the gradient.
    SumsOfA(&'a mut Tensor),
    /// As before, the sums of `b` over `k`: `[n]`.
    SumsOfB(&'a mut Tensor),
}

impl<'a> Epilogue<'a> {
    /// With a bias, or nothing.
    pub fn bias(bias: Option<&'a Tensor>) -> Epilogue<'a> {
        bias.map_or(Epilogue::None, Epilogue::Bias)
    }
}

/// How an algorithm is picked among those that cuBLASLt offers for a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Search {
    /// The one it ranks first: the same in every run.
    #[default]
    Ranked,
    /// The fastest of a few, measured at the product's first use: another run may pick another one, whose sums
    /// round otherwise.
    Timed,
}

/// A product to be run.
#[derive(Debug)]
pub struct Product<'a> {
    a: &'a Tensor,
    ta: bool,
    b: &'a Tensor,
    tb: bool,
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    scale: f32,
    accumulate: bool,
    plus: Option<&'a Tensor>,
    epilogue: Epilogue<'a>,
}

impl<'a> Product<'a> {
    /// `a b`; `a: [m, k]`, `b: [k, n]`.
    pub fn new(a: impl Into<Operand<'a>>, b: impl Into<Operand<'a>>) -> Product<'a> {
        Product::of(a.into(), b.into(), 1)
    }

    /// One product for each index of the first dimension: `[batch, m, k]` by `[batch, k, n]`.
    pub fn batched(a: impl Into<Operand<'a>>, b: impl Into<Operand<'a>>) -> Product<'a> {
        let (a, b) = (a.into(), b.into());
        let (batch, of_b) = (a.tensor.shape()[0], b.tensor.shape()[0]);
        assert_eq!(batch, of_b, "a batch of {:?} and one of {:?}", a.tensor.shape(), b.tensor.shape());
        Product::of(a, b, batch)
    }

    fn of(a: Operand<'a>, b: Operand<'a>, batch: usize) -> Product<'a> {
        let seen = |x: Operand<'_>| {
            let (rows, width) = (x.tensor.rows() / batch.max(1), x.tensor.width());
            if x.transposed { (width, rows) } else { (rows, width) }
        };
        let ((m, k), (bk, n)) = (seen(a), seen(b));
        let (ta, tb) = (a.transposed, b.transposed);
        let (a, b) = (a.tensor, b.tensor);
        let (of_a, of_b) = (a.shape(), b.shape());
        assert_eq!(k, bk, "a product of {of_a:?} (transposed: {ta}) and {of_b:?} (transposed: {tb})");
        assert_eq!(a.dtype(), b.dtype(), "a product of two types");
        Product {
            a,
            ta,
            b,
            tb,
            batch,
            m,
            n,
            k,
            scale: 1.0,
            accumulate: false,
            plus: None,
            epilogue: Epilogue::None,
        }
    }

    /// Adds to `c` instead of overwriting it.
    pub fn accumulate(mut self, accumulate: bool) -> Product<'a> {
        self.accumulate = accumulate;
        self
    }

    /// Adds a tensor like `c` before anything is rounded, so that `c = a b + plus`, and a bias where one follows.
    pub fn plus(mut self, plus: Option<&'a Tensor>) -> Product<'a> {
        self.plus = plus;
        self
    }

    /// Multiplies the product by this number, before anything is added.
    pub fn scaled(mut self, scale: f32) -> Product<'a> {
        self.scale = scale;
        self
    }

    /// With something to follow.
    pub fn then(mut self, epilogue: Epilogue<'a>) -> Product<'a> {
        self.epilogue = epilogue;
        self
    }

    /// Queues it. `c` has the type of `a` and `b`, or f32.
    pub fn into(mut self, c: &mut Tensor) -> Result<()> {
        assert_eq!(c.len(), self.batch * self.m * self.n, "a product into {:?}", c.shape());
        assert!(c.dtype() == self.a.dtype() || c.dtype() == DType::F32, "a product into {:?}", c.dtype());
        self.check_epilogue(c);
        if let Some(plus) = self.plus {
            assert!(!self.accumulate, "a product with two tensors to be added to");
            assert_eq!((plus.len(), plus.dtype()), (c.len(), c.dtype()), "what is added to a product");
        }
        if c.is_empty() {
            return Ok(());
        }
        let cuda = self.a.cuda_buffer().cuda().clone();
        assert!(cuda.is(self.b.cuda_buffer().cuda()) && cuda.is(c.cuda_buffer().cuda()), "on two cards");
        assert!(self.plus.is_none_or(|plus| cuda.is(plus.cuda_buffer().cuda())), "on two cards");
        if self.k > 0 && cuda.with_blas(|blas| blas.run(&cuda, &mut self, c))? {
            return Ok(());
        }
        // In two steps: the product as it is, then the rest by a kernel of ours.
        let epilogue = std::mem::replace(&mut self.epilogue, Epilogue::None);
        if self.k > 0 {
            let ran = cuda.with_blas(|blas| blas.run(&cuda, &mut self, c))?;
            assert!(ran, "cuBLASLt has no algorithm for a plain product: {self:?}");
        } else if let Some(plus) = self.plus {
            c.cuda_buffer_mut().copy_from(plus.cuda_buffer())?;
        } else if !self.accumulate {
            c.cuda_buffer_mut().fill(0)?;
        }
        fallback::run(&cuda, &self, epilogue, c)
    }

    fn check_epilogue(&mut self, c: &Tensor) {
        let (m, n) = (self.m, self.n);
        let full =
            |t: &Tensor| assert!(t.len() == m * n && t.dtype() == c.dtype(), "{:?} beside c", t.shape());
        let bias = |t: &Tensor| assert!(t.len() == n && t.dtype() == c.dtype(), "a bias {:?}", t.shape());
        match &self.epilogue {
            Epilogue::None => return,
            Epilogue::Bias(t) => bias(t),
            Epilogue::Gelu { bias: b, pre } => {
                b.iter().for_each(|t| bias(t));
                full(pre);
            }
            Epilogue::GeluBackward { pre } => full(pre),
            Epilogue::SumsOfA(t) => assert!(t.len() == m && t.dtype() == c.dtype(), "sums {:?}", t.shape()),
            Epilogue::SumsOfB(t) => assert!(t.len() == n && t.dtype() == c.dtype(), "sums {:?}", t.shape()),
        }
        assert_eq!(self.batch, 1, "a batched product with something to follow");
        let unchanged = matches!(self.epilogue, Epilogue::SumsOfA(_) | Epilogue::SumsOfB(_));
        assert!(!self.accumulate || unchanged, "a product that is added to c and then changed");
        let changed = !unchanged && !matches!(self.epilogue, Epilogue::Bias(_));
        assert!(
            self.plus.is_none() || !changed,
            "a product to which something is added before it is changed"
        );
    }
}

/// Settings of a card's products.
impl Cuda {
    /// Lets f32 products round their operands to TF32 (10 bits of precision): several times faster. Off at first.
    pub fn allow_tf32(&self, allow: bool) -> Result<()> {
        self.with_blas(|blas| {
            blas.tf32 = allow;
            Ok(())
        })
    }

    /// How algorithms are picked from now on.
    pub fn search_products(&self, search: Search) -> Result<()> {
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
            let mut unfused: Vec<_> = unfused.map(|(key, _)| key.to_string()).collect();
            unfused.sort();
            Ok(unfused)
        })
    }
}

/// A card's cuBLASLt: its handle, its scratch space, and a plan for every product seen.
#[derive(Debug)]
pub(super) struct Blas {
    /// `None`: cuBLASLt has no algorithm for it.
    plans: HashMap<Key, Option<Plan>>,
    workspace: Block,
    workspace_bytes: usize,
    tf32: bool,
    search: Search,
    handle: Handle,
}

impl Blas {
    pub(super) fn new(cuda: &Cuda) -> Result<Blas> {
        library::cublas_lt()?;
        let handle = Handle::new()?;
        // What NVIDIA advises: Hopper's kernels keep more of a split product there.
        let workspace_bytes = if cuda.gpu().capability >= 90 { 32 << 20 } else { 4 << 20 };
        let workspace = Block::new(cuda, workspace_bytes, Category::Workspace)?;
        Ok(Blas {
            plans: HashMap::new(),
            workspace,
            workspace_bytes,
            tf32: false,
            search: Search::Ranked,
            handle,
        })
    }

    /// Whether products may use TF32, and how algorithms are picked.
    pub(super) fn settings(&self) -> (bool, Search) {
        (self.tf32, self.search)
    }

    /// Whether it ran; `false` where cuBLASLt cannot do it.
    fn run(&mut self, cuda: &Cuda, product: &mut Product<'_>, c: &mut Tensor) -> Result<bool> {
        let key = self.key(product, c);
        if !key.possible() {
            return Ok(false);
        }
        if let Some(known) = self.plans.get(&key) {
            return match known {
                Some(plan) => self.queue(cuda, plan, plan.best(), product, c, None).map(|()| true),
                None => Ok(false),
            };
        }
        let mut plan = Plan::new(self.handle.0, &key, self.workspace_bytes)?;
        if let (Some(plan), Search::Timed) = (&mut plan, self.search) {
            self.fastest(cuda, plan, product, c)?;
        }
        // What the library offers it may still refuse to run; nothing is queued then.
        let ran = loop {
            let Some(some) = &mut plan else { break false };
            match self.queue(cuda, some, some.best(), product, c, None) {
                Ok(()) => break true,
                Err(_) if some.drop_best() => {}
                Err(e) if key.kind == Kind::Plain => return Err(e),
                Err(_) => plan = None,
            }
        };
        self.plans.insert(key, plan);
        Ok(ran)
    }

    fn key(&self, p: &Product<'_>, c: &Tensor) -> Key {
        Key {
            m: p.m,
            n: p.n,
            k: p.k,
            batch: p.batch,
            ta: p.ta,
            tb: p.tb,
            input: p.a.dtype(),
            output: c.dtype(),
            accumulate: p.accumulate || p.plus.is_some(),
            tf32: self.tf32 && p.a.dtype() == DType::F32,
            kind: match &p.epilogue {
                Epilogue::None => Kind::Plain,
                Epilogue::Bias(_) => Kind::Bias,
                Epilogue::Gelu { bias: None, .. } => Kind::Gelu,
                Epilogue::Gelu { bias: Some(_), .. } => Kind::GeluBias,
                Epilogue::GeluBackward { .. } => Kind::GeluBackward,
                Epilogue::SumsOfA(_) => Kind::SumsOfA,
                Epilogue::SumsOfB(_) => Kind::SumsOfB,
            },
        }
    }

    /// `elsewhere`: where the result goes instead of `c`, which is then only read, if at all.
    fn queue(
        &self,
        cuda: &Cuda,
        plan: &Plan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        product: &mut Product<'_>,
        c: &mut Tensor,
        elsewhere: Option<u64>,
    ) -> Result<()> {
        let (bias, aux) = match &mut product.epilogue {
            Epilogue::None => (None, None),
            Epilogue::Bias(bias) => (Some(bias.cuda_buffer().address()), None),
            Epilogue::Gelu { bias, pre } => {
                (bias.map(|b| b.cuda_buffer().address()), Some(pre.cuda_buffer_mut().address()))
            }
            Epilogue::GeluBackward { pre } => (None, Some(pre.cuda_buffer().address())),
            Epilogue::SumsOfA(sums) | Epilogue::SumsOfB(sums) => {
                (Some(sums.cuda_buffer_mut().address()), None)
            }
        };
        plan.point(bias, aux)?;
        let (a, b) = (product.a.cuda_buffer().address(), product.b.cuda_buffer().address());
        let c = c.cuda_buffer_mut().address();
        let d = elsewhere.unwrap_or(c);
        let c = product.plus.map_or(c, |plus| plus.cuda_buffer().address());
        let beta = if product.accumulate || product.plus.is_some() { 1.0f32 } else { 0.0 };
        let flops = 2.0 * (product.batch * product.m * product.n) as f64 * product.k as f64;
        let timer = cuda.time("products", flops)?;
        // SAFETY: the plan's layouts are those of the tensors, whose lengths were checked, and they stay alive in
        // the stream's order; the scratch space belongs to this handle, whose work is all on one stream.
        unsafe {
            sys::cublasLtMatmul(
                self.handle.0,
                plan.operation(),
                (&raw const product.scale).cast(),
                b as *const _,
                plan.first(),
                a as *const _,
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
    fn fastest(&self, cuda: &Cuda, plan: &mut Plan, product: &mut Product<'_>, c: &mut Tensor) -> Result<()> {
        const TIMES: u32 = 4;
        let elsewhere = match product.accumulate {
            true => Some(cuda.allocate(c.byte_len(), Category::Workspace)?),
            false => None,
        };
        let address = elsewhere.as_ref().map(|buffer| buffer.address());
        let mut best = (0, std::time::Duration::MAX);
        for i in 0..plan.algorithms() {
            let algorithm = *plan.algorithm(i);
            if self.queue(cuda, plan, &algorithm, product, c, address).is_err() {
                continue;
            }
            cuda.compute().synchronize()?;
            let start = std::time::Instant::now();
            for _ in 0..TIMES {
                self.queue(cuda, plan, &algorithm, product, c, address)?;
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

/// cuBLASLt's handle.
#[derive(Debug)]
struct Handle(cublasLtHandle_t);

// SAFETY: cuBLASLt's handle may be used from any thread.
unsafe impl Send for Handle {}

impl Handle {
    fn new() -> Result<Handle> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is loaded and a context current; it writes the handle.
        unsafe { sys::cublasLtCreate(&mut handle) }.check("starting cuBLASLt")?;
        Ok(Handle(handle))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { sys::cublasLtDestroy(self.0) };
    }
}
