//! x as the kernel reads it, and sums as y stores them: both are transposed, in blocks of 16 x 16 numbers.
//!
//! At 90 % zeros a weight of x meets only a tenth of the products that it meets in a dense layer, so that
//! moving it counts ten times as much: loops over single numbers took as long as the products of a layer of
//! 512 x 512.

use crate::cpu::scratch::DisjointSlice;
use crate::cpu::{Cpu, Isa};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// Numbers on a side of a block.
const SIDE: usize = 16;
/// Vectors of a full panel: as many as give the most products a second, measured with AVX-512.
pub(super) const VECTORS: usize = 4;
/// Columns of x that one task packs into a panel.
const STRIP: usize = 512;

/// 16 rows of 16 numbers.
type TransposeBlock = [[f32; SIDE]; SIDE];

/// Numbers of a vector.
fn lanes(isa: Isa) -> usize {
    match isa {
        Isa::Portable => 4,
        Isa::Avx2(_) => 8,
        Isa::Avx512(_) | Isa::Amx(_) => SIDE,
    }
}

/// x in panels, each `[columns of x][vectors][lanes]`, one behind the other: a vector has a number for each of as
/// many rows of x as it has lanes. Rows that do not exist are zeros.
#[derive(Debug)]
pub(super) struct InputPanels {
    numbers: Tensor,
    /// Rows of x.
    batch: usize,
    /// Columns of x.
    columns: usize,
    /// Rows of x in a full panel.
    pub width: usize,
    /// Numbers of a vector.
    pub lanes: usize,
}

impl InputPanels {
    /// Turns x `[batch, columns]`.
    pub(super) fn pack(cpu: &Cpu, x: &Tensor) -> Result<InputPanels> {
        let (batch, columns, lanes) = (x.rows(), x.width(), lanes(cpu.isa()));
        let size = columns * batch.next_multiple_of(lanes);
        let mut panels = InputPanels {
            numbers: Tensor::empty(&x.device(), &[size], DType::F32, Category::Workspace)?,
            batch,
            columns,
            width: VECTORS * lanes,
            lanes,
        };
        let strips = columns.div_ceil(STRIP);
        let places: Vec<_> =
            (0..panels.count()).map(|panel| (panels.start(panel), panels.wide(panel))).collect();
        let (x, width) = (x.slice::<f32>(), panels.width);
        let numbers = DisjointSlice::new(panels.numbers.slice_mut::<f32>());
        cpu.for_each(places.len() * strips, |task| {
            let (panel, from) = (task / strips, task % strips * STRIP);
            let to = (from + STRIP).min(columns);
            let (start, wide) = places[panel];
            // SAFETY: each task has columns of a panel of its own.
            let out = unsafe { numbers.range_mut(start + from * wide..start + to * wide) };
            let strip = PanelStrip { x, columns, batch, first: panel * width, from, wide, out };
            // SAFETY: the processor has its `Isa`.
            unsafe {
                match cpu.isa() {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512(_) | Isa::Amx(_) => transpose_avx512(strip),
                    Isa::Avx2(_) => transpose_strip::<PortableTranspose, 8>(strip),
                    _ => transpose_strip::<PortableTranspose, 4>(strip),
                }
            }
        });
        Ok(panels)
    }

    pub(super) fn count(&self) -> usize {
        self.batch.div_ceil(self.width)
    }

    /// Rows of x in a panel.
    pub(super) fn rows(&self, panel: usize) -> usize {
        self.width.min(self.batch - panel * self.width)
    }

    /// Vectors of a panel.
    pub(super) fn vectors(&self, panel: usize) -> usize {
        self.rows(panel).div_ceil(self.lanes)
    }

    /// The numbers of a panel: `[columns][vectors][lanes]`.
    pub(super) fn panel(&self, panel: usize) -> &[f32] {
        &self.numbers.slice::<f32>()[self.start(panel)..][..self.columns * self.wide(panel)]
    }

    fn start(&self, panel: usize) -> usize {
        panel * self.columns * self.width
    }

    /// Numbers of a panel for one column of x.
    fn wide(&self, panel: usize) -> usize {
        self.vectors(panel) * self.lanes
    }
}

/// Kernels `portable`, `avx2` and `avx512` over panels of so many vectors: the module's `rows::<Lanes, VECTORS>` of a job,
/// compiled for each instruction set.
macro_rules! panel_kernels {
    ($job:ident) => {
        panel_kernels! { portable, [f32; 4], $job }
        #[cfg(target_arch = "x86_64")]
        panel_kernels! { avx2, std::arch::x86_64::__m256, $job, "avx2,fma" }
        #[cfg(target_arch = "x86_64")]
        panel_kernels! { avx512, std::arch::x86_64::__m512, $job, "avx512f" }
    };
    ($name:ident, $lanes:ty, $job:ident $(, $feature:literal)?) => {
        /// # Safety
        /// The processor has the features that this is compiled for, and the job's arrays fit each other.
        $(#[target_feature(enable = $feature)])?
        unsafe fn $name(vectors: usize, job: $job<'_>) {
            // SAFETY: the caller's promise.
            unsafe {
                match vectors {
                    1 => rows::<$lanes, 1>(job),
                    2 => rows::<$lanes, 2>(job),
                    3 => rows::<$lanes, 3>(job),
                    4 => rows::<$lanes, 4>(job),
                    _ => unreachable!("a panel of {vectors} vectors"),
                }
            }
        }
    };
}
pub(super) use panel_kernels;

/// Some columns of some rows of x.
struct PanelStrip<'a> {
    x: &'a [f32],
    columns: usize,
    batch: usize,
    /// The first row.
    first: usize,
    from: usize,
    /// Numbers for one column.
    wide: usize,
    /// `[columns of the strip][wide]`.
    out: &'a mut [f32],
}

/// # Safety
/// The caller is compiled for what `X` takes.
#[inline(always)]
unsafe fn transpose_strip<X: BlockTranspose, const LANES: usize>(strip: PanelStrip<'_>) {
    let PanelStrip { x, columns, batch, first, from, wide, out } = strip;
    let count = out.len() / wide;
    for vector in (0..wide).step_by(LANES) {
        for j in (0..count).step_by(SIDE) {
            let steps = SIDE.min(count - j);
            let mut block: TransposeBlock = [[0.0; SIDE]; SIDE];
            for (lane, row) in (first + vector..batch).take(LANES).enumerate() {
                copy(&x[row * columns + from + j..][..steps], &mut block[lane][..steps]);
            }
            // SAFETY: the caller's promise.
            let turned = unsafe { X::transpose(&block) };
            for (step, turned) in turned.iter().enumerate().take(steps) {
                out[(j + step) * wide + vector..][..LANES].copy_from_slice(&turned[..LANES]);
            }
        }
    }
}

/// A line of a block, of which a full one has a length that the compiler knows.
#[inline(always)]
fn copy(from: &[f32], to: &mut [f32]) {
    match (from.as_array::<SIDE>(), to.as_mut_array::<SIDE>()) {
        (Some(from), Some(to)) => *to = *from,
        _ => to.copy_from_slice(from),
    }
}

/// Sums `[rows of W][wide]` of one panel on their way to y.
pub(super) struct PanelSums<'a> {
    /// The sums of `rows` rows of W with `live` rows of x, and some that nobody asked for.
    pub sums: &'a [f32],
    /// From one row of W to the next.
    pub wide: usize,
    /// Rows of W.
    pub rows: usize,
    /// Rows of x.
    pub live: usize,
    pub y: &'a DisjointSlice<'a, f32>,
    /// Where the first of them stands in y.
    pub at: usize,
    /// From one row of x to the next in y.
    pub stride: usize,
}

/// Writes them to y.
///
/// # Safety
/// No one else writes to these rows of x and of W, and the processor has `isa`.
pub(super) unsafe fn write(isa: Isa, sums: PanelSums<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) | Isa::Amx(_) => write_avx512(sums),
            _ => write_blocks::<PortableTranspose>(sums),
        }
    }
}

/// # Safety
/// As [`write`], and the caller is compiled for what `X` takes.
#[inline(always)]
unsafe fn write_blocks<X: BlockTranspose>(sums: PanelSums<'_>) {
    let PanelSums { sums, wide, rows, live, y, at, stride } = sums;
    // What stands side by side in y is written one after the other.
    for b in (0..live).step_by(SIDE) {
        for r in (0..rows).step_by(SIDE) {
            let count = SIDE.min(rows - r);
            let mut block: TransposeBlock = [[0.0; SIDE]; SIDE];
            for i in 0..count {
                let from = &sums[(r + i) * wide + b..(r + i + 1) * wide];
                let length = from.len().min(SIDE);
                copy(&from[..length], &mut block[i][..length]);
            }
            // SAFETY: the caller's promise.
            let turned = unsafe { X::transpose(&block) };
            for (i, turned) in turned.iter().enumerate().take(SIDE.min(live - b)) {
                let at = at + (b + i) * stride + r;
                // SAFETY: the caller's promise.
                copy(&turned[..count], unsafe { y.range_mut(at..at + count) });
            }
        }
    }
}

/// Rows become columns.
trait BlockTranspose {
    /// # Safety
    /// The caller is compiled for the instructions that this takes.
    unsafe fn transpose(block: &TransposeBlock) -> TransposeBlock;
}

/// Number after number.
struct PortableTranspose;

impl BlockTranspose for PortableTranspose {
    #[inline(always)]
    unsafe fn transpose(block: &TransposeBlock) -> TransposeBlock {
        std::array::from_fn(|i| std::array::from_fn(|j| block[j][i]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BlockTranspose, SIDE, TransposeBlock};
    use crate::cpu::gemm::transpose;

    /// In the registers of AVX-512.
    pub(super) struct Avx512Transpose;

    impl BlockTranspose for Avx512Transpose {
        #[inline(always)]
        unsafe fn transpose(block: &TransposeBlock) -> TransposeBlock {
            let mut out: TransposeBlock = [[0.0; SIDE]; SIDE];
            // SAFETY: rows of 16 numbers, and the caller's promise.
            unsafe {
                let rows = std::array::from_fn(|i| _mm512_loadu_si512(block[i].as_ptr().cast()));
                for (out, row) in out.iter_mut().zip(transpose(rows)) {
                    _mm512_storeu_si512(out.as_mut_ptr().cast(), row);
                }
            }
            out
        }
    }
}

/// [`transpose_strip`] with AVX-512.
///
/// # Safety
/// The processor has it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn transpose_avx512(strip: PanelStrip<'_>) {
    // SAFETY: compiled for it.
    unsafe { transpose_strip::<x86::Avx512Transpose, SIDE>(strip) }
}

/// [`write_blocks`] with AVX-512.
///
/// # Safety
/// The processor has it; as [`write`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn write_avx512(sums: PanelSums<'_>) {
    // SAFETY: the caller's promise.
    unsafe { write_blocks::<x86::Avx512Transpose>(sums) }
}
