//! The product on the processor.
//!
//! x is turned into panels: some of its rows, side by side, column after column. A kept weight then takes one contiguous
//! run of a panel, multiplies it and adds it to sums that stay in registers until the row of W is done. The panel waits
//! in the second-level cache while all rows of W pass over it. Wider blocking, by columns of W so that a piece of the
//! panel stays in the first-level cache, gained a fifth at 90 % zeros in f32 and lost as much at 98 %.
//!
//! In bf16 a cell of 32 bits holds two of x's rows, so that half the bytes are read: a shift and a mask make f32 of them.

use crate::cpu::gemm::Lanes;
use crate::cpu::scratch::Disjoint;
use crate::cpu::{Cpu, Isa};
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;
use crate::{bf16, with_float};

use super::Csr;

/// Rows of W whose sums wait to be written out together: a line of y is then filled at once.
const ROWS: usize = 32;
/// The most lanes of a vector.
const MOST_LANES: usize = 16;
/// The most numbers that x's rows of a panel have side by side.
const MOST_WIDTH: usize = 6 * MOST_LANES;
/// Products of one task: enough to hide the cost of handing it to a thread.
const TASK: usize = 1 << 17;
/// Columns of x that one task turns into a panel.
const TURN: usize = 512;

/// `y = x W^T`.
pub(super) fn matmul(cpu: &Cpu, x: &Tensor, w: &Csr, y: &mut Tensor) -> Result<()> {
    with_float!(x.dtype(), T => {
        let panels = Panels::turn::<T>(cpu, x)?;
        product::<T>(cpu, &panels, w, y.slice_mut::<T>());
    });
    Ok(())
}

/// Numbers of a vector.
fn lanes(isa: Isa) -> usize {
    match isa {
        Isa::Portable => 4,
        Isa::Avx2 => 8,
        Isa::Avx512 | Isa::Amx => MOST_LANES,
    }
}

/// An element type as panels hold it.
trait Packed: Float {
    /// Rows of x in a cell.
    const EACH: usize;
    /// Vectors of cells in a full panel: as many as give the most products a second, measured with AVX-512.
    const VECTORS: usize;
    /// The cell of these rows' elements.
    fn cell(rows: impl Fn(usize) -> Self) -> u32;
    /// The kernel for an instruction set.
    ///
    /// # Safety
    /// The processor has `isa`, and the job's parts fit each other.
    unsafe fn kernel(isa: Isa, vectors: usize, job: Job<'_, Self>);
}

impl Packed for f32 {
    const EACH: usize = 1;
    const VECTORS: usize = 4;
    #[inline(always)]
    fn cell(rows: impl Fn(usize) -> f32) -> u32 {
        rows(0).to_bits()
    }
    unsafe fn kernel(isa: Isa, vectors: usize, job: Job<'_, f32>) {
        // SAFETY: the caller's promise.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Amx => avx512_f32(vectors, job),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2_f32(vectors, job),
                _ => portable_f32(vectors, job),
            }
        }
    }
}

impl Packed for bf16 {
    const EACH: usize = 2;
    const VECTORS: usize = 3;
    #[inline(always)]
    fn cell(rows: impl Fn(usize) -> bf16) -> u32 {
        u32::from(rows(0).to_bits()) | u32::from(rows(1).to_bits()) << 16
    }
    unsafe fn kernel(isa: Isa, vectors: usize, job: Job<'_, bf16>) {
        // SAFETY: the caller's promise.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Amx => avx512_bf16(vectors, job),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2_bf16(vectors, job),
                _ => portable_bf16(vectors, job),
            }
        }
    }
}

/// x in panels, each `[columns of x][vectors][lanes]` cells, one behind the other. Rows that do not exist are zeros.
struct Panels {
    cells: Tensor,
    /// Rows of x.
    batch: usize,
    /// Columns of x.
    columns: usize,
    /// Cells of a full panel for one column of x.
    full: usize,
    /// Rows of x in a full panel.
    width: usize,
    lanes: usize,
}

impl Panels {
    fn turn<T: Packed>(cpu: &Cpu, x: &Tensor) -> Result<Panels> {
        let (batch, columns, lanes) = (x.rows(), x.width(), lanes(cpu.isa()));
        let full = T::VECTORS * lanes;
        let width = full * T::EACH;
        let rest = (batch % width).div_ceil(T::EACH * lanes) * lanes;
        let cells = columns * (batch / width * full + rest);
        let mut panels = Panels {
            cells: Tensor::empty(&x.device(), &[cells], DType::U32, Category::Workspace)?,
            batch,
            columns,
            full,
            width,
            lanes,
        };
        let (x, count) = (x.slice::<T>(), panels.count());
        let strips = columns.div_ceil(TURN);
        let sizes: Vec<usize> = (0..count).map(|panel| panels.cells_wide::<T>(panel)).collect();
        let cells = Disjoint::new(panels.cells.slice_mut::<u32>());
        cpu.for_each(count * strips, |task| {
            let (panel, strip) = (task / strips, task % strips);
            let (from, to) = (strip * TURN, ((strip + 1) * TURN).min(columns));
            let wide = sizes[panel];
            let start = panel * columns * full;
            // SAFETY: each task has a panel's columns of its own.
            let out = unsafe { cells.piece(start + from * wide..start + to * wide) };
            let first = panel * width;
            turn_strip::<T>(x, columns, first, batch, from, wide, lanes, out);
        });
        Ok(panels)
    }

    /// How many panels.
    fn count(&self) -> usize {
        self.batch.div_ceil(self.width)
    }

    /// Rows of x in a panel.
    fn rows(&self, panel: usize) -> usize {
        self.width.min(self.batch - panel * self.width)
    }

    /// Cells of a panel for one column of x.
    fn cells_wide<T: Packed>(&self, panel: usize) -> usize {
        self.rows(panel).div_ceil(T::EACH * self.lanes) * self.lanes
    }

    fn panel<T: Packed>(&self, panel: usize) -> &[u32] {
        let cells = self.columns * self.cells_wide::<T>(panel);
        &self.cells.slice::<u32>()[panel * self.columns * self.full..][..cells]
    }
}

/// Columns `from ..` of x's rows `first ..`, as the cells `out`: `[columns][wide]`.
fn turn_strip<T: Packed>(
    x: &[T],
    columns: usize,
    first: usize,
    batch: usize,
    from: usize,
    wide: usize,
    lanes: usize,
    out: &mut [u32],
) {
    let count = out.len() / wide;
    // A line of x at a time: what is written in between stays in the first-level cache.
    for j0 in (0..count).step_by(16) {
        for cell in 0..wide {
            let row = first + cell / lanes * lanes * T::EACH + cell % lanes;
            for j in j0..(j0 + 16).min(count) {
                out[j * wide + cell] = T::cell(|each| {
                    let row = row + each * lanes;
                    if row < batch { x[row * columns + from + j] } else { T::zeroed() }
                });
            }
        }
    }
}

fn product<T: Packed>(cpu: &Cpu, panels: &Panels, w: &Csr, y: &mut [T]) {
    let (offsets, places, values) =
        (w.offsets.slice::<u32>(), w.places.slice::<u32>(), w.values.slice::<T>());
    // Rows of a task by what W keeps on average: a matter of its size, not of the threads.
    let a_row = (w.kept() / w.rows.max(1)).max(1) * panels.width;
    let rows = TASK.div_ceil(a_row).next_multiple_of(ROWS);
    let tasks = w.rows.div_ceil(rows);
    let y = Disjoint::new(y);
    cpu.for_each(panels.count() * tasks, |task| {
        let (panel, task) = (task / tasks, task % tasks);
        let (cells, live) = (panels.panel::<T>(panel), panels.rows(panel));
        let vectors = panels.cells_wide::<T>(panel) / panels.lanes;
        let wide = vectors * panels.lanes * T::EACH;
        let mut sums = [0f32; ROWS * MOST_WIDTH];
        let end = ((task + 1) * rows).min(w.rows);
        for start in (task * rows..end).step_by(ROWS) {
            let count = ROWS.min(end - start);
            let offsets = &offsets[start..=start + count];
            let job = Job { offsets, places, values, cells, columns: w.columns, sums: &mut sums };
            // SAFETY: the processor has its `Isa`. A `Csr` has offsets up to its number of places and values, and
            // places below its columns, of which each panel has as many as x; the sums hold ROWS of the widest panel.
            unsafe { T::kernel(cpu.isa(), vectors, job) };
            for b in 0..live {
                let at = (panel * panels.width + b) * w.rows + start;
                // SAFETY: rows of x and of W that no other task has.
                let y = unsafe { y.piece(at..at + count) };
                for (r, y) in y.iter_mut().enumerate() {
                    *y = T::from_f32(sums[r * wide + b]);
                }
            }
        }
    });
}

/// Some rows of W and a panel.
struct Job<'a, T> {
    /// Of these rows, and one more.
    offsets: &'a [u32],
    places: &'a [u32],
    values: &'a [T],
    /// `[columns][vectors][lanes]`.
    cells: &'a [u32],
    columns: usize,
    /// `[rows][rows of x]`.
    sums: &'a mut [f32],
}

/// How a vector of cells becomes `EACH` vectors of numbers.
trait Cells<L: Lanes, const EACH: usize>: Packed {
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
/// The caller is compiled for `L`; offsets end within places and values, places within the columns, and `sums` holds
/// all rows.
#[inline(always)]
unsafe fn rows<L: Lanes, T: Cells<L, EACH>, const EACH: usize, const V: usize>(job: &mut Job<'_, T>) {
    debug_assert!(job.cells.len() == job.columns * V * L::N);
    debug_assert!(job.sums.len() >= (job.offsets.len() - 1) * EACH * V * L::N);
    let mut out = job.sums.as_mut_ptr();
    for ends in job.offsets.windows(2) {
        let kept = ends[0] as usize..ends[1] as usize;
        let (places, values) = (&job.places[kept.clone()], &job.values[kept]);
        // SAFETY: the caller's promise covers every access.
        unsafe {
            let mut sums = [[L::splat(0.0); EACH]; V];
            for (&place, value) in places.iter().zip(values) {
                debug_assert!((place as usize) < job.columns);
                let weight = L::splat(value.to_f32());
                let cells = job.cells.as_ptr().add(place as usize * V * L::N);
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
        $(#[target_feature(enable = $feature)])?
        unsafe fn $name(vectors: usize, mut job: Job<'_, $type>) {
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
