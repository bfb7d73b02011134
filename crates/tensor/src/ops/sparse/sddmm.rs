//! A product of which only some elements are wanted: `(a^T b)[i, j]` for the kept elements of a matrix.
//!
//! a and b are packed into panels: some rows of the batch, side by side, column after column. For a row i of
//! the matrix the vectors of a's column i stay in registers while the columns of b at its kept elements pass
//! by; what each adds up to stays a vector until the last panel, and becomes one number then.
//!
//! A task is a tile of the matrix: few enough columns that their part of a panel waits in the second-level
//! cache while all rows of the tile pass over it, and as many rows as leave room there for the vectors.
//! (Tiles of whole rows read b from memory again for every few of them, and took as long as the dense
//! product.) Sums depend on the sizes alone, not on the threads.

use std::ops::Range;

use crate::cpu::gemm::Lanes;
use crate::cpu::scratch::{DisjointSlice, ScratchPool};
use crate::cpu::{Cpu, isa::by_isa};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

use super::SparsityPattern;
use super::panels::{InputPanels, panel_kernels};

/// Columns of a tile.
const COLUMNS: usize = 512;
/// Kept elements of a tile, about.
const KEPT: usize = 4096;

/// Adds up the kept elements, in their order. a: `[batch, rows]`, b: `[batch, columns]`, both f32.
pub(super) fn product(
    cpu: &Cpu,
    a: &Tensor,
    b: &Tensor,
    at: &SparsityPattern,
    sums: &mut [f32],
) -> Result<()> {
    let (a, b) = (InputPanels::pack(cpu, a)?, InputPanels::pack(cpu, b)?);
    let col_indices = at.col_indices.slice::<u32>();
    let tiles: Vec<Vec<TileSegment>> = tiles(at).collect();
    let most = tiles.iter().map(|tile| kept(tile)).max().unwrap_or(0);
    let alloc =
        || Tensor::empty(&at.col_indices.device(), &[most * a.lanes], DType::F32, Category::Workspace);
    let scratch = ScratchPool::new(cpu, tiles.len(), alloc)?;
    let sums = DisjointSlice::new(sums);
    cpu.for_each(tiles.len(), |tile| {
        let segments = &tiles[tile];
        scratch.lend(|scratch| {
            let vectors = &mut scratch.slice_mut::<f32>()[..kept(segments) * a.lanes];
            vectors.fill(0.0);
            for panel in 0..a.count() {
                let job = SddmmTile {
                    a: a.panel(panel),
                    b: b.panel(panel),
                    segments,
                    col_indices,
                    vectors: &mut *vectors,
                };
                // SAFETY: the processor has its `Isa`. Segments lie within the indices, which are below the
                // columns of the pattern, of which b has as many; a has a column for each of its rows. Both
                // panels are as wide.
                unsafe { by_isa!(cpu.isa(), [portable, avx2, avx512], a.vectors(panel), job) };
            }
            let mut vectors = vectors.chunks_exact(a.lanes);
            for segment in segments {
                // SAFETY: each kept element is in one tile.
                let sums = unsafe { sums.range_mut(segment.kept.clone()) };
                sums.iter_mut().zip(vectors.by_ref()).for_each(|(sum, vector)| *sum = total(vector));
            }
        });
    });
    Ok(())
}

/// The kept elements of a row in a tile.
struct TileSegment {
    row: usize,
    /// Which of the kept elements of the matrix.
    kept: Range<usize>,
}

fn kept(tile: &[TileSegment]) -> usize {
    tile.iter().map(|segment| segment.kept.len()).sum()
}

/// The tiles of a matrix, each of a segment for every one of its rows.
fn tiles(at: &SparsityPattern) -> impl Iterator<Item = Vec<TileSegment>> {
    let (offsets, col_indices) = (at.offsets.slice::<u32>(), at.col_indices.slice::<u32>());
    let wide = COLUMNS.min(at.columns).max(1);
    let a_row = (col_indices.len() * wide / (at.rows * at.columns).max(1)).max(1);
    let high = KEPT.div_ceil(a_row);
    let segment = move |row: usize, columns: &Range<usize>| {
        let all = offsets[row] as usize..offsets[row + 1] as usize;
        let before = |column: usize| {
            all.start
                + col_indices[all.clone()].partition_point(|column_index| (*column_index as usize) < column)
        };
        TileSegment { row, kept: before(columns.start)..before(columns.end) }
    };
    (0..at.rows).step_by(high).flat_map(move |first| {
        (0..at.columns).step_by(wide).map(move |column| {
            let rows = first..(first + high).min(at.rows);
            rows.map(|row| segment(row, &(column..column + wide))).collect()
        })
    })
}

/// The sum of a vector: halves are added until one number is left.
fn total(vector: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    sums[..vector.len()].copy_from_slice(vector);
    for half in [8, 4, 2, 1] {
        let (low, high) = sums.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
    }
    sums[0]
}

/// A tile, and a panel of each operand.
struct SddmmTile<'a> {
    /// `[columns][vectors][lanes]`.
    a: &'a [f32],
    b: &'a [f32],
    segments: &'a [TileSegment],
    /// Column indices of the matrix's kept elements, ascending in each row.
    col_indices: &'a [u32],
    /// `[kept elements of the tile][lanes]`.
    vectors: &'a mut [f32],
}

/// # Safety
/// The caller is compiled for `L`, and the job's arrays fit each other.
#[inline(always)]
unsafe fn rows<L: Lanes, const V: usize>(job: SddmmTile<'_>) {
    let SddmmTile { a, b, segments, col_indices, vectors } = job;
    debug_assert!(vectors.len() == kept(segments) * L::N);
    let mut out = vectors.as_mut_ptr();
    for segment in segments {
        debug_assert!((segment.row + 1) * V * L::N <= a.len());
        // SAFETY: the caller's promise covers every access.
        unsafe {
            let numbers = a.as_ptr().add(segment.row * V * L::N);
            let a_column: [L; V] = std::array::from_fn(|v| L::load(numbers.add(v * L::N)));
            for &column_index in &col_indices[segment.kept.clone()] {
                debug_assert!((column_index as usize + 1) * V * L::N <= b.len());
                let numbers = b.as_ptr().add(column_index as usize * V * L::N);
                let mut sum = L::load(out);
                for (v, a_column) in a_column.iter().enumerate() {
                    sum = sum.add_product(*a_column, L::load(numbers.add(v * L::N)));
                }
                sum.store(out);
                out = out.add(L::N);
            }
        }
    }
}

panel_kernels! { SddmmTile }
