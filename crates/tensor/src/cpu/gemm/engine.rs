//! What a kernel offers to the loops of [`super::drive`], and the one f32 kernel, written over a vector type.
//!
//! The packed form of an operand is a row of panels. A panel holds some rows of `a` (or columns of `b`) for
//! all of the packed depth, in the order in which the kernel reads them; rows (columns) that do not exist
//! are zeros. Row (column) `i`, the first of its panel, begins at `i * padded depth`.

use super::pack::PackSource;
use crate::dtype::Float;

/// Where a kernel finds its rows of `a`, in elements of the packed type.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedRows<C> {
    /// The first element.
    pub at: *const C,
    /// From one row to the next.
    pub row: usize,
    /// From one step in depth to the next (AMX: 32 elements of depth are one step).
    pub step: usize,
    /// AMX: from one tile of 16 rows to the next.
    pub tile: usize,
}

/// A kernel with its packed form. A value of it proves that the processor has its instructions: the loops
/// take one before they call any of its functions, which are unsafe for that reason and for their bare
/// pointers.
pub(super) trait GemmKernel: Copy + Sync {
    /// What a packed number is stored as.
    type Cell: Copy;
    /// Rows of a panel of `a`.
    const ROWS: usize;
    /// Columns of a panel of `b`.
    const COLS: usize;
    /// Depth is packed in multiples of this.
    const UNIT: usize;
    /// Depth of one call of [`GemmKernel::tile`]: what keeps a panel of `b` in the first-level cache.
    const DEPTH: usize;
    /// Depth for which a block of `a` is packed at once; a multiple of `DEPTH`.
    const SLAB: usize;
    /// Whether [`GemmKernel::tile`] writes nothing beyond `rows` x `cols`.
    const EXACT: bool;
    /// Held while tiles are computed.
    type Session;

    /// Prepares the thread, as AMX's tiles need it, until the session is dropped.
    fn begin(self) -> Self::Session;
    /// Rows that [`GemmKernel::tile`] takes at once for so many columns; a multiple of `ROWS`.
    fn rows(_cols: usize) -> usize {
        Self::ROWS
    }
    /// `a` where it lies, if the kernel can read it there: `rows` x `depth` of it.
    fn in_place<T: Float>(_a: PackSource<T>, _rows: usize, _depth: usize) -> Option<PackedRows<Self::Cell>> {
        None
    }
    /// `a` as [`GemmKernel::pack_a`] has left it at `at`, with panels of `padded` depth.
    fn packed(at: *const Self::Cell, padded: usize) -> PackedRows<Self::Cell>;
    /// Packs `rows` x `depth` of `a` into panels of `padded` depth.
    ///
    /// # Safety
    /// `a` can be read at all of these, and `out` can be written for as many full panels as `rows` need.
    unsafe fn pack_a<T: Float>(
        a: PackSource<T>,
        rows: usize,
        depth: usize,
        padded: usize,
        out: *mut Self::Cell,
    );
    /// Packs `from..to` of the depth of `cols` columns into panels of `padded` depth; `b` is seen by columns.
    ///
    /// # Safety
    /// `b` can be read at all of these, and `out` can be written for as many full panels as `cols` need.
    unsafe fn pack_b<T: Float>(
        b: PackSource<T>,
        cols: usize,
        from: usize,
        to: usize,
        padded: usize,
        out: *mut Self::Cell,
    );
    /// Where depth `p` begins in a panel of `b` of `cols` columns.
    fn depth_offset(p: usize, cols: usize) -> usize;
    /// `c = a b`, or `c += a b` if `add`, for one panel of columns and at most `rows(cols)` rows.
    ///
    /// # Safety
    /// A session has begun on this thread. `a` and `b` hold `depth` packed steps of `rows` and `cols`. `c`
    /// can be read and written for `rows` x `cols` at `c_stride`, or, where the kernel is not `EXACT`, for
    /// these rounded up to its tiles.
    unsafe fn tile(
        rows: usize,
        cols: usize,
        depth: usize,
        a: PackedRows<Self::Cell>,
        b: *const Self::Cell,
        b_padded: usize,
        c: *mut f32,
        c_stride: usize,
        add: bool,
    );
}

/// Asks for `bytes` from `at` on to be brought into the second-level cache. A wish: any address is allowed.
#[inline(always)]
pub(super) fn fetch<C>(at: *const C, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast::<i8>().wrapping_add(line)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, bytes);
}

/// A vector of f32.
pub(crate) trait Lanes: Copy {
    /// Numbers in one.
    const N: usize;
    /// # Safety
    /// The caller is compiled for this vector's instructions.
    unsafe fn splat(x: f32) -> Self;
    /// # Safety
    /// As for `splat`, and `from` holds `N` numbers, of any alignment.
    unsafe fn load(from: *const f32) -> Self;
    /// The first `n` only; zeros after them.
    ///
    /// # Safety
    /// As for `splat`, `n` is at most `N`, and `from` holds `n` numbers.
    unsafe fn load_partial(from: *const f32, n: usize) -> Self;
    /// # Safety
    /// As for `splat`, and `to` can be written for `N` numbers, of any alignment.
    unsafe fn store(self, to: *mut f32);
    /// The first `n` only.
    ///
    /// # Safety
    /// As for `splat`, `n` is at most `N`, and `to` can be written for `n` numbers.
    unsafe fn store_partial(self, to: *mut f32, n: usize);
    /// `self + x y`.
    ///
    /// # Safety
    /// As for `splat`.
    unsafe fn add_product(self, x: Self, y: Self) -> Self;
}

/// An `R` x `V`-vector chunk of `c` in registers. `b`'s panel is `V` vectors wide.
///
/// # Safety
/// `a` and `b` hold `depth` steps, `c` holds `R` rows of `cols`, and the caller is compiled for `L`.
#[inline(always)]
pub(super) unsafe fn registers<L: Lanes, const R: usize, const V: usize>(
    cols: usize,
    depth: usize,
    a: PackedRows<f32>,
    b: *const f32,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    // SAFETY: the caller's promise covers every access below.
    unsafe {
        let mut sums = [[L::splat(0.0); V]; R];
        let full = cols == V * L::N;
        let valid = |v: usize| cols.saturating_sub(v * L::N).min(L::N);
        if add {
            for r in 0..R {
                for v in 0..V {
                    let at = c.add(r * c_stride + v * L::N);
                    sums[r][v] = if full { L::load(at) } else { L::load_partial(at, valid(v)) };
                }
            }
        }
        let (mut at, mut b) = (a.at, b);
        for _ in 0..depth {
            let mut columns = [L::splat(0.0); V];
            for v in 0..V {
                columns[v] = L::load(b.add(v * L::N));
            }
            for r in 0..R {
                let x = L::splat(*at.add(r * a.row));
                for v in 0..V {
                    sums[r][v] = sums[r][v].add_product(x, columns[v]);
                }
            }
            at = at.add(a.step);
            b = b.add(V * L::N);
        }
        for r in 0..R {
            for v in 0..V {
                let at = c.add(r * c_stride + v * L::N);
                if full { sums[r][v].store(at) } else { sums[r][v].store_partial(at, valid(v)) }
            }
        }
    }
}

/// Makes the proof of an instruction set an f32 [`GemmKernel`] over a vector type: `rows` x two vectors, one
/// vector for narrow panels.
macro_rules! float_engine {
    ($name:ty, $lanes:ty, features: [$($feature:literal)?], rows: $rows:literal,
     each: [$($r:literal)*], depth: $depth:literal, slab: $slab:literal, pack: $pack:path) => {
        /// # Safety
        /// As for `registers`, and the processor has the features that this is compiled for.
        $(#[target_feature(enable = $feature)])?
        unsafe fn tile_of<const R: usize, const V: usize>(
            cols: usize, depth: usize, a: PackedRows<f32>, b: *const f32, c: *mut f32, c_stride: usize, add: bool,
        ) {
            // SAFETY: the caller's promise; packed or in place, one stride is 1, which the compiler should see.
            unsafe {
                if a.row == 1 {
                    registers::<$lanes, R, V>(cols, depth, PackedRows { row: 1, ..a }, b, c, c_stride, add)
                } else {
                    debug_assert_eq!(a.step, 1, "rows that are contiguous in neither direction are packed");
                    registers::<$lanes, R, V>(cols, depth, PackedRows { step: 1, ..a }, b, c, c_stride, add)
                }
            }
        }

        impl GemmKernel for $name {
            type Cell = f32;
            const ROWS: usize = $rows;
            const COLS: usize = 2 * <$lanes as Lanes>::N;
            const UNIT: usize = 1;
            const DEPTH: usize = $depth;
            const SLAB: usize = $slab;
            const EXACT: bool = true;
            type Session = ();

            fn begin(self) {}

            fn in_place<T: Float>(a: PackSource<T>, _rows: usize, _depth: usize) -> Option<PackedRows<f32>> {
                let lies_well = T::DTYPE == DType::F32 && (a.outer == 1 || a.depth == 1);
                lies_well.then(|| PackedRows { at: a.at.cast(), row: a.outer, step: a.depth, tile: 0 })
            }

            fn packed(at: *const f32, _padded: usize) -> PackedRows<f32> {
                PackedRows { at, row: 1, step: $rows, tile: 0 }
            }

            unsafe fn pack_a<T: Float>(a: PackSource<T>, rows: usize, depth: usize, padded: usize, out: *mut f32) {
                // A few steps of depth over all panels, then the next: long runs of `a` as it is stored.
                let run = if a.outer == 1 { 16 } else { depth.max(1) };
                for p in (0..depth).step_by(run) {
                    for i in (0..rows).step_by($rows) {
                        let (count, steps, offset) = ((rows - i).min($rows), run.min(depth - p), i * padded + p * $rows);
                        // SAFETY: the caller's `out` holds whole panels.
                        unsafe { $pack(a.from(i, p), count, $rows, steps, out.add(offset)) };
                    }
                }
            }

            unsafe fn pack_b<T: Float>(
                b: PackSource<T>, cols: usize, from: usize, to: usize, padded: usize, out: *mut f32,
            ) {
                let run = if b.outer == 1 { 16 } else { (to - from).max(1) };
                for p in (from..to).step_by(run) {
                    for j in (0..cols).step_by(Self::COLS) {
                        let n = (cols - j).min(Self::COLS);
                        let offset = j * padded + Self::depth_offset(p, n);
                        let width = Self::depth_offset(1, n);
                        // SAFETY: as above.
                        unsafe { $pack(b.from(j, p), n, width, run.min(to - p), out.add(offset)) };
                    }
                }
            }

            fn depth_offset(p: usize, cols: usize) -> usize {
                p * if cols > <$lanes as Lanes>::N { Self::COLS } else { <$lanes as Lanes>::N }
            }

            unsafe fn tile(
                rows: usize, cols: usize, depth: usize, a: PackedRows<f32>, b: *const f32, _b_padded: usize,
                c: *mut f32, c_stride: usize, add: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    match (rows, cols > <$lanes as Lanes>::N) {
                        $(($r, true) => tile_of::<$r, 2>(cols, depth, a, b, c, c_stride, add),
                          ($r, false) => tile_of::<$r, 1>(cols, depth, a, b, c, c_stride, add),)*
                        _ => unreachable!("a panel has at most {} rows", $rows),
                    }
                }
            }
        }
    };
}
pub(super) use float_engine;
