//! The product on the processor.
//!
//! x is packed into panels: some of its rows, side by side, column after column. A kept weight then takes one
//! contiguous run of a panel, multiplies it and adds it to sums that stay in registers until the row of W is
//! done. The panel waits in the second-level cache while all rows of W pass over it. Wider blocking, by
//! columns of W so that a chunk of the panel stays in the first-level cache, gained a fifth at 90 % zeros in
//! f32 and lost as much at 98 %.

use crate::cpu::gemm::Lanes;
use crate::cpu::scratch::DisjointSlice;
use crate::cpu::{Cpu, isa::by_isa};
use crate::error::Result;
use crate::tensor::Tensor;

use super::SparsityPattern;
use super::panels::{self, InputPanels, PanelSums, VECTORS, panel_kernels};

/// Rows of W whose sums wait to be written out together: some lines of y are then filled at once.
const ROWS: usize = 64;
/// Rows of W between which a part of those lines is asked for.
const STEP: usize = 8;
/// The most rows of x in a panel, those of AVX-512.
const MOST_WIDTH: usize = VECTORS * 16;
/// Products of one task: enough to hide the cost of handing it to a thread.
const TASK: usize = 1 << 17;

/// `y = x W^T + bias`, W by its pattern and kept weights.
pub(super) fn matmul(
    cpu: &Cpu,
    x: &Tensor,
    (pattern, values): (&SparsityPattern, &[f32]),
    bias: Option<&[f32]>,
    y: &mut [f32],
) -> Result<()> {
    let panels = InputPanels::pack(cpu, x)?;
    let SparsityPattern { offsets, col_indices, rows: w_rows, columns } = pattern;
    let (offsets, col_indices) = (offsets.slice::<u32>(), col_indices.slice::<u32>());
    let (w_rows, columns) = (*w_rows, *columns);
    // Rows of a task by what W keeps on average: a matter of its size, not of the threads.
    let a_row = (values.len() / w_rows.max(1)).max(1) * panels.width;
    let rows = TASK.div_ceil(a_row).next_multiple_of(ROWS);
    let tasks = w_rows.div_ceil(rows);
    let y = DisjointSlice::new(y);
    cpu.for_each(panels.count() * tasks, |task| {
        let (panel, task) = (task / tasks, task % tasks);
        let (numbers, vectors) = (panels.panel(panel), panels.vectors(panel));
        let wide = vectors * panels.lanes;
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
                    numbers,
                    columns,
                    bias: bias.map(|bias| &bias[first..last]),
                    sums,
                };
                // SAFETY: the processor has its `Isa`. A pattern has offsets up to its number of
                // indices and values, and indices below its columns, of which each panel has as many as x; the sums
                // hold ROWS of the widest panel.
                unsafe { by_isa!(cpu.isa(), [portable, avx2, avx512], vectors, job) };
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
    Ok(())
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
struct SpmmTile<'a> {
    /// Of these rows, and one more.
    offsets: &'a [u32],
    col_indices: &'a [u32],
    values: &'a [f32],
    /// `[columns][vectors][lanes]`.
    numbers: &'a [f32],
    columns: usize,
    /// Of these rows: what their sums start from.
    bias: Option<&'a [f32]>,
    /// `[rows][rows of x]`.
    sums: &'a mut [f32],
}

/// The sums of some rows of W over a panel of `V` vectors.
///
/// # Safety
/// The caller is compiled for `L`; offsets end within indices and values, indices within the columns, and
/// `sums` holds all rows.
#[inline(always)]
unsafe fn rows<L: Lanes, const V: usize>(job: SpmmTile<'_>) {
    debug_assert!(job.numbers.len() == job.columns * V * L::N);
    debug_assert!(job.sums.len() >= (job.offsets.len() - 1) * V * L::N);
    let mut out = job.sums.as_mut_ptr();
    for (row, ends) in job.offsets.windows(2).enumerate() {
        let kept = ends[0] as usize..ends[1] as usize;
        let (col_indices, values) = (&job.col_indices[kept.clone()], &job.values[kept]);
        // SAFETY: the caller's promise covers every access.
        unsafe {
            let mut sums = [L::splat(job.bias.map_or(0.0, |bias| bias[row])); V];
            for (&column_index, value) in col_indices.iter().zip(values) {
                debug_assert!((column_index as usize) < job.columns);
                let weight = L::splat(*value);
                let numbers = job.numbers.as_ptr().add(column_index as usize * V * L::N);
                for v in 0..V {
                    sums[v] = sums[v].add_product(weight, L::load(numbers.add(v * L::N)));
                }
            }
            for sum in sums {
                sum.store(out);
                out = out.add(L::N);
            }
        }
    }
}

panel_kernels! { SpmmTile }
