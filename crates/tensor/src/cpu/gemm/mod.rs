//! Matrix products on the processor, after Goto and van de Geijn, "Anatomy of High-Performance Matrix
//! Multiplication" (2008): both operands are copied into panels that a small kernel reads in order.
//!
//! `a: [m, k]`, `b: [k, n]`, `c: [m, n]`; `a` and `b` may lie in any way (transposed, one head of a wider
//! matrix), the rows of `c` are contiguous. Sums are always in f32.
//!
//! - `drive`: the loops over blocks, and what runs on which thread;
//! - `engine`: what a kernel offers to those loops; `avx512`, `avx2`, `portable` for f32, `amx` for bf16;
//! - `pack` and `finish`: before the kernel and behind it;
//! - `scratch`: memory that a thread keeps between calls; [`packing`]: how much of it a product takes, in the
//!   ledger.
//!
//! An element of `c` is summed over `k` in an order that only `k` decides. Blocks of rows and columns, and so
//! the number of threads, never change its bits.

/// Picks the kernel for a type of operand: `$engine` is it in `$body`.
macro_rules! with_engine {
    ($isa:expr, $dtype:expr, $engine:ident => $body:expr) => {
        match ($isa, $dtype) {
            #[cfg(target_arch = "x86_64")]
            ($crate::cpu::Isa::Amx($engine), $crate::dtype::DType::Bf16) => $body,
            #[cfg(target_arch = "x86_64")]
            ($crate::cpu::Isa::Avx2($engine), _) => $body,
            (isa, _) => match isa.avx512() {
                #[cfg(target_arch = "x86_64")]
                Some($engine) => $body,
                _ => {
                    let $engine = $crate::cpu::gemm::portable::Portable;
                    $body
                }
            },
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod drive;
mod engine;
mod finish;
mod pack;
pub mod packing;
mod portable;
mod scratch;
#[cfg(test)]
mod tests;

use super::Cpu;
use crate::cpu::activation::ActivationFn;
use crate::dtype::Float;
use crate::memory::Category;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::transpose;
use drive::GemmJob;
pub(crate) use engine::Lanes;
pub use packing::GemmWorkspace;

/// A matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Debug, Clone, Copy)]
pub struct MatrixRef<'a, T> {
    /// Where element (0, 0) stands first.
    pub data: &'a [T],
    /// Elements between one row and the next.
    pub row_stride: usize,
    /// Elements between one column and the next.
    pub col_stride: usize,
}

impl<'a, T> MatrixRef<'a, T> {
    /// The matrix of `width` columns that `data` holds row after row, or its transpose.
    pub fn of(data: &'a [T], width: usize, transposed: bool) -> MatrixRef<'a, T> {
        let (row_stride, col_stride) = if transposed { (1, width) } else { (width, 1) };
        MatrixRef { data, row_stride, col_stride }
    }

    fn fits(&self, rows: usize, cols: usize) -> bool {
        rows == 0
            || cols == 0
            || (rows - 1) * self.row_stride + (cols - 1) * self.col_stride < self.data.len()
    }
}

/// A matrix to write, rows contiguous.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    /// Where element (0, 0) stands first.
    pub data: &'a mut [T],
    /// Elements between one row and the next.
    pub row_stride: usize,
}

impl<T> MatrixMut<'_, T> {
    fn fits(&self, rows: usize, cols: usize) -> bool {
        cols <= self.row_stride.max(if rows == 1 { cols } else { 0 })
            && (rows == 0 || cols == 0 || (rows - 1) * self.row_stride + cols <= self.data.len())
    }
}

/// What happens to a finished sum on its way to `c`, while it is still in the cache.
#[derive(Debug)]
pub struct GemmEpilogue<'a, T, O> {
    /// A row of length `n` that is added to every row.
    pub bias: Option<&'a [T]>,
    /// Applied last, to the value as `c`'s type holds it: the same bits as a separate pass.
    pub activation: Option<ActivationFn>,
    /// Where the value before the activation is kept, for the backward pass.
    pub pre: Option<MatrixMut<'a, O>>,
}

impl<T, O> GemmEpilogue<'_, T, O> {
    /// The sum as it is.
    pub fn none() -> Self {
        GemmEpilogue { bias: None, activation: None, pre: None }
    }
}

/// `c = a b` or `c += a b` on the calling thread; a: [m, k], b: [k, n], c: [m, n]. Sums in f32.
pub fn serial<T: Float, O: Float>(
    packing: &GemmWorkspace,
    [m, n, k]: [usize; 3],
    a: MatrixRef<'_, T>,
    b: MatrixRef<'_, T>,
    c: MatrixMut<'_, O>,
    accumulate: bool,
) {
    let isa = packing.allows(T::DTYPE, m, n, k);
    let job = GemmJob::new(isa, [m, n, k], a, b, c, accumulate, GemmEpilogue::none());
    with_engine!(isa, T::DTYPE, engine => drive::serial(engine, &job));
}

/// As [`serial`], over the threads of `cpu`, with an [`GemmEpilogue`]. The bits do not depend on their number.
pub fn parallel<T: Float, O: Float>(
    cpu: &Cpu,
    [m, n, k]: [usize; 3],
    a: MatrixRef<'_, T>,
    b: MatrixRef<'_, T>,
    c: MatrixMut<'_, O>,
    accumulate: bool,
    epilogue: GemmEpilogue<'_, T, O>,
) {
    let isa = cpu.isa();
    let job = GemmJob::new(isa, [m, n, k], a, b, c, accumulate, epilogue);
    with_engine!(isa, T::DTYPE, engine => {
        let bytes = drive::parallel_bytes(engine, cpu.threads(), [m, n, k]);
        let _counted = cpu.ledger().track(Category::Workspace, bytes);
        drive::parallel(engine, cpu, &job);
    });
}
