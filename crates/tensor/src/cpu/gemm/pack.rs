//! Copying operands into panels, in its plain form; `avx512` and `amx` have faster ones for the usual strides.

use crate::dtype::Float;

/// An operand as packing sees it: rows of `a` or columns of `b` are the outer index, the depth is the inner one.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackSource<T> {
    /// Element (0, 0).
    pub at: *const T,
    /// Elements from one row of `a` (column of `b`) to the next.
    pub outer: usize,
    /// Elements from one step in depth to the next.
    pub depth: usize,
}

// SAFETY: a source is only read, and lives no longer than the matrix it was made of.
unsafe impl<T> Sync for PackSource<T> {}

impl<T> PackSource<T> {
    /// The submatrix that begins at row `i` and depth `p`.
    pub fn from(self, i: usize, p: usize) -> PackSource<T> {
        PackSource { at: self.at.wrapping_add(i * self.outer + p * self.depth), ..self }
    }
}

/// One f32 panel: `out[p * width + i] = source(i, p)` for `i < count`, zero up to `width`.
///
/// # Safety
/// `source` holds `count` x `depth`, `out` has room for `depth * width`.
#[inline(always)]
pub(super) unsafe fn panel<T: Float>(
    source: PackSource<T>,
    count: usize,
    width: usize,
    depth: usize,
    out: *mut f32,
) {
    for p in 0..depth {
        // SAFETY: the caller's promise.
        unsafe {
            let from = source.at.add(p * source.depth);
            let to = std::slice::from_raw_parts_mut(out.add(p * width), width);
            if source.outer == 1 {
                let from = std::slice::from_raw_parts(from, count);
                to.iter_mut().zip(from).for_each(|(y, x)| *y = x.to_f32());
            } else {
                (0..count).for_each(|i| to[i] = (*from.add(i * source.outer)).to_f32());
            }
            to[count..].fill(0.0);
        }
    }
}
