//! The product on the processor.
//!
//! x is packed into panels: some of its rows, side by side, column after column. A kept weight then takes one
//! contiguous run of a panel, multiplies it and adds it to sums that stay in registers until the row of W is
//! done. The panel waits in the second-level cache while all rows of W pass over it. Wider blocking, by
//! columns of W so that a chunk of the panel stays in the first-level cache, gained a fifth at 90 % zeros in
//! f32 and lost as much at 98 %.
//!
//! In bf16 a cell of 32 bits holds two of x's rows, so that half the bytes are read: a shift and a mask make
//! f32 of them.

use crate::cpu::gemm::Lanes;
use crate::cpu::scratch::DisjointSlice;
use crate::cpu::{Cpu, Isa, isa::by_isa};
use crate::error::Result;
use crate::tensor::Tensor;
use crate::{bf16, with_float};

use super::panels::{self, InputPanels, PanelElement, PanelSums};
use super::{Csr, SparsityPattern};

/// Rows of W whose sums wait to be written out together: some lines of y are then filled at once.
const ROWS: usize = 64;
/// Rows of W between which a part of those lines is asked for.
const STEP: usize = 8;
/// The most rows of x in a panel: three vectors of 16 cells, each of two.
const MOST_WIDTH: usize = 96;
/// Products of one task: enough to hide the cost of handing it to a thread.
const TASK: usize = 1 << 17;

/// `y = x W^T + bias`.
pub(super) fn matmul(cpu: &Cpu, x: &Tensor, w: &Csr, bias: Option<&Tensor>, y: &mut Tensor) -> Result<()> {
    with_float!(x.dtype(), T => {
        let panels = InputPanels::pack::<T>(cpu, x)?;
        product::<T>(cpu, &panels, w, bias.map(|bias| bias.slice::<T>()), y.slice_mut::<T>());
    });
    Ok(())
}

/// An element type with its kernels.
trait SparseKernel: PanelElement {
    /// Adds up the rows of a job, with a panel of so many vectors.
    ///
    /// # Safety
    /// The processor has `isa`, and the job's arrays fit each other.
    unsafe fn run(isa: Isa, vectors: usize, job: SpmmTile<'_, Self>);
}

impl SparseKernel for f32 {
    unsafe fn run(isa: Isa, vectors: usize, job: SpmmTile<'_, f32>) {
        // SAFETY: the caller's promise.
        unsafe { by_isa!(isa, [portable_f32, avx2_f32, avx512_f32], vectors, job) }
    }
}

impl SparseKernel for bf16 {
    unsafe fn run(isa: Isa, vectors: usize, job: SpmmTile<'_, bf16>) {
        // SAFETY: the caller's promise.
        unsafe { by_isa!(isa, [portable_bf16, avx2_bf16, avx512_bf16], vectors, job) }
    }
}

fn product<T: SparseKernel>(cpu: &Cpu, panels: &InputPanels, w: &Csr, bias: Option<&[T]>, y: &mut [T]) {
    let SparsityPattern { offsets, col_indices, rows: w_rows, columns } = &w.pattern;
    let (offsets, col_indices, values) =
        (offsets.slice::<u32>(), col_indices.slice::<u32>(), w.values.slice::<T>());
    let (w_rows, columns) = (*w_rows, *columns);
    // Rows of a task by what W keeps on average: a matter of its size, not of the threads.
    let a_row = (w.kept() / w_rows.max(1)).max(1) * panels.width;
    let rows = TASK.div_ceil(a_row).next_multiple_of(ROWS);
    let tasks = w_rows.div_ceil(rows);
    let y = DisjointSlice::new(y);
    cpu.for_each(panels.count() * tasks, |task| {
        let (panel, task) = (task / tasks, task % tasks);
        let (cells, vectors) = (panels.panel(panel), panels.vectors(panel));
        let wide = vectors * panels.lanes * T::EACH;
        let mut sums = [0f32; ROWS * MOST_WIDTH];
        let end = ((task + 1) * rows).min(w_rows);
        for start in (task * rows..end).step_by(ROWS) {
            let count = ROWS.min(end - start);
            let at = panel * panels.width * w_rows + start;
            let live = panels.rows(panel);
            for step in (0..count).step_by(STEP) {
                let (first, last) = (start + step, start + (step + STEP).min(count));
                let (offsets, sums) = (&offsets[first..=last], &mut sums[step * wide..]);
                let job = SpmmTile {
                    offsets,
                    col_indices,
                    values,
                    cells,
                    columns,
                    bias: bias.map(|bias| &bias[first..last]),
                    sums,
                };
                // SAFETY: the processor has its `Isa`. A `Csr` has offsets up to its number of indices and
                // values, and indices below its columns, of which each panel has as many as x; the sums hold
                // ROWS of the widest panel.
                unsafe { T::run(cpu.isa(), vectors, job) };
                // The lines that will be written are asked for meanwhile: rows of y lie far apart.
                for b in live * step / count..live * (last - start) / count {
                    // SAFETY: no other task has these rows of x and of W.
                    fetch(unsafe { y.range_mut(at + b * w_rows..at + b * w_rows + count) });
                }
            }
            let sums = PanelSums { sums: &sums, wide, rows: count, live, y: &y, at, stride: w_rows };
            // SAFETY: no other task has these rows of x and of W, and the processor has its `Isa`.
            unsafe { panels::write(cpu.isa(), sums) };
        }
    });
}

/// Asks for a slice to be brought into the second-level cache.
#[inline(always)]
fn fetch<T>(slice: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(slice)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(slice.as_ptr().cast::<i8>().wrapping_add(line)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = slice;
}

/// Some rows of W and a panel.
struct SpmmTile<'a, T> {
    /// Of these rows, and one more.
    offsets: &'a [u32],
    col_indices: &'a [u32],
    values: &'a [T],
    /// `[columns][vectors][lanes]`.
    cells: &'a [u32],
    columns: usize,
    /// Of these rows: what their sums start from.
    bias: Option<&'a [T]>,
    /// `[rows][rows of x]`.
    sums: &'a mut [f32],
}

/// How a vector of cells becomes `EACH` vectors of numbers.
trait Cells<L: Lanes, const EACH: usize>: SparseKernel {
    /// # Safety
    /// The caller is compiled for `L`, and a vector of cells is there.
    unsafe fn load(from: *const u32) -> [L; EACH];
}

impl<L: Lanes> Cells<L, 1> for f32 {
    #[inline(always)]
    unsafe fn load(from: *const u32) -> [L; 1] {
        // SAFETY: the caller's promise; the cells are the bits of f32.
        [unsafe { L::load(from.cast()) }]
    }
}

impl Cells<[f32; 4], 2> for bf16 {
    #[inline(always)]
    unsafe fn load(from: *const u32) -> [[f32; 4]; 2] {
        // SAFETY: the caller's promise.
        let cells = unsafe { from.cast::<[u32; 4]>().read_unaligned() };
        [cells.map(|cell| f32::from_bits(cell << 16)), cells.map(|cell| f32::from_bits(cell & 0xffff_0000))]
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Cells, bf16};

    impl Cells<__m256, 2> for bf16 {
        #[inline(always)]
        unsafe fn load(from: *const u32) -> [__m256; 2] {
            // SAFETY: the caller is compiled for AVX2 and has 8 cells there.
            unsafe {
                let cells = _mm256_loadu_si256(from.cast());
                let upper = _mm256_and_si256(cells, _mm256_set1_epi32(0xffff_0000_u32 as i32));
                [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(cells)), _mm256_castsi256_ps(upper)]
            }
        }
    }

    impl Cells<__m512, 2> for bf16 {
        #[inline(always)]
        unsafe fn load(from: *const u32) -> [__m512; 2] {
            // SAFETY: the caller is compiled for AVX-512 and has 16 cells there.
            unsafe {
                let cells = _mm512_loadu_si512(from.cast());
                let upper = _mm512_and_si512(cells, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(cells)), _mm512_castsi512_ps(upper)]
            }
        }
    }
}

/// The sums of some rows of W over a panel of `V` vectors.
///
/// # Safety
/// The caller is compiled for `L`; offsets end within indices and values, indices within the columns, and
/// `sums` holds all rows.
#[inline(always)]
unsafe fn rows<L: Lanes, T: Cells<L, EACH>, const EACH: usize, const V: usize>(job: &mut SpmmTile<'_, T>) {
    debug_assert!(job.cells.len() == job.columns * V * L::N);
    debug_assert!(job.sums.len() >= (job.offsets.len() - 1) * EACH * V * L::N);
    let mut out = job.sums.as_mut_ptr();
    for (row, ends) in job.offsets.windows(2).enumerate() {
        let kept = ends[0] as usize..ends[1] as usize;
        let (col_indices, values) = (&job.col_indices[kept.clone()], &job.values[kept]);
        // SAFETY: the caller's promise covers every access.
        unsafe {
            let start = job.bias.map_or(0.0, |bias| bias[row].to_f32());
            let mut sums = [[L::splat(start); EACH]; V];
            for (&column_index, value) in col_indices.iter().zip(values) {
                debug_assert!((column_index as usize) < job.columns);
                let weight = L::splat(value.to_f32());
                let cells = job.cells.as_ptr().add(column_index as usize * V * L::N);
                for v in 0..V {
                    let numbers = T::load(cells.add(v * L::N));
                    for e in 0..EACH {
                        sums[v][e] = sums[v][e].add_product(weight, numbers[e]);
                    }
                }
            }
            for v in 0..V {
                for e in 0..EACH {
                    sums[v][e].store(out);
                    out = out.add(L::N);
                }
            }
        }
    }
}

/// The kernel over one vector type, compiled for its instructions.
macro_rules! kernel {
    ($name:ident, $lanes:ty, $type:ty, each: $each:literal, vectors: [$($v:literal)*] $(, $feature:literal)?) => {
        /// # Safety
        /// The processor has the features that this is compiled for, and the job's arrays fit each other.
        $(#[target_feature(enable = $feature)])?
        unsafe fn $name(vectors: usize, mut job: SpmmTile<'_, $type>) {
            // SAFETY: the caller's promise.
            unsafe {
                match vectors {
                    $($v => rows::<$lanes, $type, $each, $v>(&mut job),)*
                    _ => unreachable!("a panel of {vectors} vectors"),
                }
            }
        }
    };
}

kernel! { portable_f32, [f32; 4], f32, each: 1, vectors: [1 2 3 4] }
kernel! { portable_bf16, [f32; 4], bf16, each: 2, vectors: [1 2 3] }
#[cfg(target_arch = "x86_64")]
kernel! { avx2_f32, std::arch::x86_64::__m256, f32, each: 1, vectors: [1 2 3 4], "avx2,fma" }
#[cfg(target_arch = "x86_64")]
kernel! { avx2_bf16, std::arch::x86_64::__m256, bf16, each: 2, vectors: [1 2 3], "avx2,fma" }
#[cfg(target_arch = "x86_64")]
kernel! { avx512_f32, std::arch::x86_64::__m512, f32, each: 1, vectors: [1 2 3 4], "avx512f" }
#[cfg(target_arch = "x86_64")]
kernel! { avx512_bf16, std::arch::x86_64::__m512, bf16, each: 2, vectors: [1 2 3], "avx512f" }
