//! Matrix products on a GPU: by cuBLASLt, with what follows them done on the way out where it can, by kernels
//! of ours where it cannot.
//!
//! `a: [m, k]`, `b: [k, n]`, `c: [m, n]`, row after row.

mod fallback;

use crate::cuda::blas::{EpilogueKind, MatmulCall, MatmulKey};
use crate::cuda::{Build, Cuda, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::operand::Operand;
use crate::ops::columns;
use crate::tensor::Tensor;

/// The kernels that stand in where cuBLASLt has none.
pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "epilogue.cu",
    includes: &[],
    text: include_str!("epilogue.cu"),
    exact: false,
    builds: Build::FLOATS,
};

/// What happens to a finished sum on its way to `c`. Each tensor has `c`'s type.
#[derive(Debug)]
pub enum MatmulEpilogue<'a> {
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
}

impl<'a> MatmulEpilogue<'a> {
    /// With a bias, or nothing.
    pub fn bias(bias: Option<&'a Tensor>) -> MatmulEpilogue<'a> {
        bias.map_or(MatmulEpilogue::None, MatmulEpilogue::Bias)
    }
}

/// A product to be run.
#[derive(Debug)]
pub struct GpuMatmul<'a> {
    a: &'a Tensor,
    ta: bool,
    b: &'a Tensor,
    tb: bool,
    /// The first column of each factor that is read, as it is stored.
    first: [usize; 2],
    m: usize,
    n: usize,
    k: usize,
    accumulate: bool,
    plus: Option<&'a Tensor>,
    epilogue: MatmulEpilogue<'a>,
}

impl<'a> GpuMatmul<'a> {
    /// `a b`; `a: [m, k]`, `b: [k, n]`.
    pub fn new(a: impl Into<Operand<'a>>, b: impl Into<Operand<'a>>) -> GpuMatmul<'a> {
        let (a, b) = (a.into(), b.into());
        let ((m, k), (bk, n)) = (a.extents(), b.extents());
        let (ta, tb) = (a.transposed, b.transposed);
        let first = [a.first, b.first];
        let (a, b) = (a.tensor, b.tensor);
        let (of_a, of_b) = (a.shape(), b.shape());
        assert_eq!(k, bk, "a product of {of_a:?} (transposed: {ta}) and {of_b:?} (transposed: {tb})");
        assert_eq!(a.dtype(), b.dtype(), "a product of two types");
        let (accumulate, plus, epilogue) = (false, None, MatmulEpilogue::None);
        GpuMatmul { a, ta, b, tb, first, m, n, k, accumulate, plus, epilogue }
    }

    /// Adds to `c` instead of overwriting it.
    pub fn accumulate(mut self, accumulate: bool) -> GpuMatmul<'a> {
        self.accumulate = accumulate;
        self
    }

    /// Adds a tensor like `c` before anything is rounded, so that `c = a b + plus`, and a bias where one follows.
    pub fn plus(mut self, plus: Option<&'a Tensor>) -> GpuMatmul<'a> {
        self.plus = plus;
        self
    }

    /// With something to follow.
    pub fn then(mut self, epilogue: MatmulEpilogue<'a>) -> GpuMatmul<'a> {
        self.epilogue = epilogue;
        self
    }

    /// Queues it for the columns of `c` from `first` on; `c` has the type of `a` and `b`. Whether it can: not
    /// where columns begin between two groups of 16 bytes, nor where cuBLASLt has no algorithm for it.
    pub(super) fn into_columns(mut self, c: &mut Tensor, first: usize) -> Result<bool> {
        assert!(c.rows() == self.m && first + self.n <= c.width(), "a product into {:?}", c.shape());
        let cuda = self.a.cuda_buffer().cuda().clone();
        assert!(cuda.is(self.b.cuda_buffer().cuda()) && cuda.is(c.cuda_buffer().cuda()), "on two GPUs");
        if self.m == 0 || self.n == 0 {
            return Ok(true);
        }
        if self.k == 0 || !self.is_aligned(c, first) {
            return Ok(false);
        }
        self.ask(&cuda, c, first)
    }

    /// Whether all columns begin at 16 bytes in every row, as the fast kernels want it.
    fn is_aligned(&self, c: &Tensor, first: usize) -> bool {
        let whole = |elements: usize, x: &Tensor| (elements * x.dtype().bytes()).is_multiple_of(16);
        let starts = |first: usize, x: &Tensor| whole(first, x) && (first == 0 || whole(x.width(), x));
        starts(self.first[0], self.a)
            && starts(self.first[1], self.b)
            && whole(first, c)
            && whole(c.width(), c)
    }

    /// Queues it. `c` has the type of `a` and `b`, or f32.
    pub fn into(mut self, c: &mut Tensor) -> Result<()> {
        assert_eq!(c.len(), self.m * self.n, "a product into {:?}", c.shape());
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
        assert!(cuda.is(self.b.cuda_buffer().cuda()) && cuda.is(c.cuda_buffer().cuda()), "on two GPUs");
        assert!(self.plus.is_none_or(|plus| cuda.is(plus.cuda_buffer().cuda())), "on two GPUs");
        if !self.is_full() && !self.is_aligned(c, 0) {
            let of = |x: &Tensor, first: usize, columns: usize| {
                columns::take(x, first..first + columns, Category::Workspace)
            };
            let a = of(self.a, self.first[0], if self.ta { self.m } else { self.k })?;
            let b = of(self.b, self.first[1], if self.tb { self.k } else { self.n })?;
            return GpuMatmul { a: &a, b: &b, first: [0; 2], ..self }.into(c);
        }
        if self.k > 0 && self.ask(&cuda, c, 0)? {
            return Ok(());
        }
        // In two steps: the product as it is, then the rest by a kernel of ours.
        let epilogue = std::mem::replace(&mut self.epilogue, MatmulEpilogue::None);
        if self.k > 0 {
            let ran = self.ask(&cuda, c, 0)?;
            assert!(ran, "cuBLASLt has no algorithm for a plain product: {self:?}");
        } else if let Some(plus) = self.plus {
            c.cuda_buffer_mut().copy_from(plus.cuda_buffer())?;
        } else if !self.accumulate {
            c.cuda_buffer_mut().fill(0)?;
        }
        fallback::run(&cuda, &self, epilogue, c)
    }

    /// Whether both factors are read in full.
    fn is_full(&self) -> bool {
        let (of_a, of_b) = (if self.ta { self.m } else { self.k }, if self.tb { self.k } else { self.n });
        of_a == self.a.width() && of_b == self.b.width()
    }

    /// Asks cuBLASLt for it, into the columns of `c` from `first` on: whether it ran.
    fn ask(&mut self, cuda: &Cuda, c: &mut Tensor, first: usize) -> Result<bool> {
        let key = self.key(c);
        let behind = |x: &Tensor, columns: usize| (columns * x.dtype().bytes()) as u64;
        let (vector, matrix) = match &mut self.epilogue {
            MatmulEpilogue::None => (None, None),
            MatmulEpilogue::Bias(bias) => (Some(bias.cuda_buffer().address()), None),
            MatmulEpilogue::Gelu { bias, pre } => {
                (bias.map(|b| b.cuda_buffer().address()), Some(pre.cuda_buffer_mut().address()))
            }
        };
        let call = MatmulCall {
            key,
            a: self.a.cuda_buffer().address() + behind(self.a, self.first[0]),
            b: self.b.cuda_buffer().address() + behind(self.b, self.first[1]),
            c: c.cuda_buffer_mut().address() + behind(c, first),
            plus: self.plus.map(|plus| plus.cuda_buffer().address()),
            vector,
            matrix,
        };
        // SAFETY: the lengths of all tensors were checked, and they stay alive in the stream's order.
        cuda.with_blas(|blas| unsafe { blas.run(cuda, &call) })
    }

    /// Elements between two rows of `a`, `b` and `c` as they are stored, where any of them is not read or written
    /// in full.
    fn strides(&self, c: &Tensor) -> Option<[usize; 3]> {
        // An output of several dimensions may be the product under another shape.
        let of_c = if c.len() == self.m * self.n { self.n } else { c.width() };
        (!self.is_full() || of_c != self.n).then(|| [self.a.width(), self.b.width(), of_c])
    }

    fn key(&self, c: &Tensor) -> MatmulKey {
        MatmulKey {
            m: self.m,
            n: self.n,
            k: self.k,
            ta: self.ta,
            tb: self.tb,
            strides: self.strides(c),
            input: self.a.dtype(),
            output: c.dtype(),
            accumulate: self.accumulate || self.plus.is_some(),
            kind: match &self.epilogue {
                MatmulEpilogue::None => EpilogueKind::Plain,
                MatmulEpilogue::Bias(_) => EpilogueKind::Bias,
                MatmulEpilogue::Gelu { bias: None, .. } => EpilogueKind::Gelu,
                MatmulEpilogue::Gelu { bias: Some(_), .. } => EpilogueKind::GeluBias,
            },
        }
    }

    fn check_epilogue(&mut self, c: &Tensor) {
        let (m, n) = (self.m, self.n);
        let full =
            |t: &Tensor| assert!(t.len() == m * n && t.dtype() == c.dtype(), "{:?} beside c", t.shape());
        let bias = |t: &Tensor| assert!(t.len() == n && t.dtype() == c.dtype(), "a bias {:?}", t.shape());
        match &self.epilogue {
            MatmulEpilogue::None => return,
            MatmulEpilogue::Bias(t) => bias(t),
            MatmulEpilogue::Gelu { bias: b, pre } => {
                b.iter().for_each(|t| bias(t));
                full(pre);
            }
        }
        assert!(!self.accumulate, "a product that is added to c and then changed");
        let changed = !matches!(self.epilogue, MatmulEpilogue::Bias(_));
        assert!(
            self.plus.is_none() || !changed,
            "a product to which something is added before it is changed"
        );
    }
}
