//! x as the kernel reads it, and sums as y stores them: both are transposed, in blocks of 16 x 16 numbers.
//!
//! At 90 % zeros a weight of x meets only a tenth of the products that it meets in a dense layer, so that
//! moving it counts ten times as much: loops over single numbers took as long as the products of a layer of
//! 512 x 512.

use crate::bf16;
use crate::cpu::scratch::DisjointSlice;
use crate::cpu::{Cpu, Isa};
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// Numbers on a side of a block.
const SIDE: usize = 16;
/// Columns of x that one task packs into a panel.
const STRIP: usize = 512;

/// 16 rows of 16 numbers.
type TransposeBlock = [[u32; SIDE]; SIDE];

/// An element type as panels hold it, in cells of 32 bits.
pub(super) trait PanelElement: Float {
    /// Rows of x in a cell.
    const EACH: usize;
    /// Vectors of cells in a full panel: as many as give the most products a second, measured with AVX-512.
    const VECTORS: usize;
    /// The elements of one row, added to cells that have those of the rows before it.
    fn fill(cells: &mut [u32], row: usize, elements: &[Self]);
}

impl PanelElement for f32 {
    const EACH: usize = 1;
    const VECTORS: usize = 4;
    #[inline(always)]
    fn fill(cells: &mut [u32], _row: usize, elements: &[f32]) {
        cells.iter_mut().zip(elements).for_each(|(cell, x)| *cell = x.to_bits());
    }
}

impl PanelElement for bf16 {
    const EACH: usize = 2;
    const VECTORS: usize = 3;
    #[inline(always)]
    fn fill(cells: &mut [u32], row: usize, elements: &[bf16]) {
        match row {
            0 => cells.iter_mut().zip(elements).for_each(|(cell, x)| *cell = u32::from(x.to_bits())),
            _ => cells.iter_mut().zip(elements).for_each(|(cell, x)| *cell |= u32::from(x.to_bits()) << 16),
        }
    }
}

/// Numbers of a vector.
fn lanes(isa: Isa) -> usize {
    match isa {
        Isa::Portable => 4,
        Isa::Avx2(_) => 8,
        Isa::Avx512(_) | Isa::Amx(_) => SIDE,
    }
}

/// x in panels, each `[columns of x][vectors][lanes]` cells, one behind the other. A vector of cells holds as
/// many rows of x as it has lanes, or twice as many: then the lower halves of its cells are the first of
/// them. Rows that do not exist are zeros.
#[derive(Debug)]
pub(super) struct InputPanels {
    cells: Tensor,
    /// Rows of x.
    batch: usize,
    /// Columns of x.
    columns: usize,
    /// Rows of x in a full panel.
    pub width: usize,
    /// Cells of a vector.
    pub lanes: usize,
    /// Rows of x in a vector.
    vector: usize,
}

impl InputPanels {
    /// Turns x `[batch, columns]`.
    pub(super) fn pack<T: PanelElement>(cpu: &Cpu, x: &Tensor) -> Result<InputPanels> {
        let (batch, columns, lanes) = (x.rows(), x.width(), lanes(cpu.isa()));
        let vector = T::EACH * lanes;
        let cells = columns * batch.div_ceil(vector) * lanes;
        let mut panels = InputPanels {
            cells: Tensor::empty(&x.device(), &[cells], DType::U32, Category::Workspace)?,
            batch,
            columns,
            width: T::VECTORS * vector,
            lanes,
            vector,
        };
        let strips = columns.div_ceil(STRIP);
        let col_indices: Vec<_> =
            (0..panels.count()).map(|panel| (panels.start(panel), panels.wide(panel))).collect();
        let (x, width) = (x.slice::<T>(), panels.width);
        let cells = DisjointSlice::new(panels.cells.slice_mut::<u32>());
        cpu.for_each(col_indices.len() * strips, |task| {
            let (panel, from) = (task / strips, task % strips * STRIP);
            let to = (from + STRIP).min(columns);
            let (start, wide) = col_indices[panel];
            // SAFETY: each task has columns of a panel of its own.
            let out = unsafe { cells.range_mut(start + from * wide..start + to * wide) };
            let strip = PanelStrip { x, columns, batch, first: panel * width, from, wide, out };
            // SAFETY: the processor has its `Isa`.
            unsafe {
                match cpu.isa() {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512(_) | Isa::Amx(_) => transpose_avx512(strip),
                    Isa::Avx2(_) => transpose_strip::<T, PortableTranspose, 8>(strip),
                    _ => transpose_strip::<T, PortableTranspose, 4>(strip),
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
        self.rows(panel).div_ceil(self.vector)
    }

    /// The cells of a panel: `[columns][vectors][lanes]`.
    pub(super) fn panel(&self, panel: usize) -> &[u32] {
        &self.cells.slice::<u32>()[self.start(panel)..][..self.columns * self.wide(panel)]
    }

    fn start(&self, panel: usize) -> usize {
        panel * self.columns * (self.width / self.vector * self.lanes)
    }

    /// Cells of a panel for one column of x.
    fn wide(&self, panel: usize) -> usize {
        self.vectors(panel) * self.lanes
    }
}

/// Some columns of some rows of x.
struct PanelStrip<'a, T> {
    x: &'a [T],
    columns: usize,
    batch: usize,
    /// The first row.
    first: usize,
    from: usize,
    /// Cells for one column.
    wide: usize,
    /// `[columns of the strip][wide]`.
    out: &'a mut [u32],
}

/// # Safety
/// The caller is compiled for what `X` takes.
#[inline(always)]
unsafe fn transpose_strip<T: PanelElement, X: BlockTranspose, const LANES: usize>(strip: PanelStrip<'_, T>) {
    let PanelStrip { x, columns, batch, first, from, wide, out } = strip;
    let count = out.len() / wide;
    for cell in (0..wide).step_by(LANES) {
        let first = first + cell * T::EACH;
        for j in (0..count).step_by(SIDE) {
            let steps = SIDE.min(count - j);
            let mut block: TransposeBlock = [[0; SIDE]; SIDE];
            for lane in 0..LANES {
                for each in 0..T::EACH {
                    let row = first + each * LANES + lane;
                    if row < batch {
                        let at = row * columns + from + j;
                        // A whole line of the block has a length that the compiler knows.
                        match x[at..at + steps].as_array::<SIDE>() {
                            Some(elements) => T::fill(&mut block[lane], each, elements),
                            None => T::fill(&mut block[lane], each, &x[at..at + steps]),
                        }
                    }
                }
            }
            // SAFETY: the caller's promise.
            let turned = unsafe { X::transpose(&block) };
            for (step, turned) in turned.iter().enumerate().take(steps) {
                out[(j + step) * wide + cell..][..LANES].copy_from_slice(&turned[..LANES]);
            }
        }
    }
}

/// Sums `[rows of W][wide]` of one panel on their way to y.
pub(super) struct PanelSums<'a, T> {
    /// The sums of `rows` rows of W with `live` rows of x, and some that nobody asked for.
    pub sums: &'a [f32],
    /// From one row of W to the next.
    pub wide: usize,
    /// Rows of W.
    pub rows: usize,
    /// Rows of x.
    pub live: usize,
    pub y: &'a DisjointSlice<'a, T>,
    /// Where the first of them stands in y.
    pub at: usize,
    /// From one row of x to the next in y.
    pub stride: usize,
}

/// Writes them to y, rounded to its type.
///
/// # Safety
/// No one else writes to these rows of x and of W, and the processor has `isa`.
pub(super) unsafe fn write<T: Float>(isa: Isa, sums: PanelSums<'_, T>) {
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) | Isa::Amx(_) => write_avx512(sums),
            _ => write_blocks::<T, PortableTranspose>(sums),
        }
    }
}

/// # Safety
/// As [`write`], and the caller is compiled for what `X` takes.
#[inline(always)]
unsafe fn write_blocks<T: Float, X: BlockTranspose>(sums: PanelSums<'_, T>) {
    let PanelSums { sums, wide, rows, live, y, at, stride } = sums;
    // What stands side by side in y is written one after the other.
    for b in (0..live).step_by(SIDE) {
        for r in (0..rows).step_by(SIDE) {
            let count = SIDE.min(rows - r);
            let mut block: TransposeBlock = [[0; SIDE]; SIDE];
            for i in 0..count {
                let from = &sums[(r + i) * wide + b..(r + i + 1) * wide];
                match from.first_chunk::<SIDE>() {
                    Some(from) => f32::fill(&mut block[i], 0, from),
                    None => f32::fill(&mut block[i], 0, from),
                }
            }
            // SAFETY: the caller's promise.
            let turned = unsafe { X::transpose(&block) };
            for (i, turned) in turned.iter().enumerate().take(SIDE.min(live - b)) {
                let at = at + (b + i) * stride + r;
                // SAFETY: the caller's promise.
                let y = unsafe { y.range_mut(at..at + count) };
                match y.as_mut_array::<SIDE>() {
                    Some(y) => round(turned, y),
                    None => round(turned, y),
                }
            }
        }
    }
}

#[inline(always)]
fn round<T: Float>(bits: &[u32; SIDE], y: &mut [T]) {
    y.iter_mut().zip(bits).for_each(|(y, bits)| *y = T::from_f32(f32::from_bits(*bits)));
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
            let mut out: TransposeBlock = [[0; SIDE]; SIDE];
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

/// [`turn_strip`] with AVX-512.
///
/// # Safety
/// The processor has it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn transpose_avx512<T: PanelElement>(strip: PanelStrip<'_, T>) {
    // SAFETY: compiled for it.
    unsafe { transpose_strip::<T, x86::Avx512Transpose, SIDE>(strip) }
}

/// [`write_blocks`] with AVX-512.
///
/// # Safety
/// The processor has it; as [`write`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn write_avx512<T: Float>(sums: PanelSums<'_, T>) {
    // SAFETY: the caller's promise.
    unsafe { write_blocks::<T, x86::Avx512Transpose>(sums) }
}
