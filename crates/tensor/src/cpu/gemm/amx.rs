//! bf16 products in AMX tiles. A tile of `a` is 16 rows x 32 of depth; a tile of `b` is 16 pairs of depth
//! x 16 columns, the two of a pair side by side; a tile of `c` is 16 x 16 sums in f32.
//!
//! Packed, both are 1 KiB blocks that follow each other along the depth, so the kernel only walks forward.
//! Seen as 32-bit lanes, a pair of depth is one lane: a block of `a` is [row, pair], a block of `b`
//! [pair, column]. An operand whose depth is contiguous loads as [outer, pair]; one whose rows (columns) are
//! contiguous loads as [pair, outer] by interleaving two of its lines. So packing is one of two loads and
//! perhaps a transposition.
//!
//! The intrinsics are not stable yet, hence the assembly, one instruction each. The compiler never uses tile
//! registers itself, so they keep their content from one to the next.

use std::arch::asm;
use std::arch::x86_64::*;

use super::avx512::{first, transpose};
use super::engine::{GemmKernel, PackedRows};
use super::pack::PackSource;
use crate::bf16;
use crate::cpu::isa::Amx;
use crate::dtype::{DType, Float};

/// Rows of a tile.
const TILE: usize = 16;
/// Depth of a tile.
const STEP: usize = 32;
/// Elements of a tile.
const AREA: usize = TILE * STEP;

macro_rules! tile {
    (zero $t:literal) => {
        asm!(concat!("tilezero tmm", $t), options(nomem, nostack, preserves_flags))
    };
    (load $t:literal, $at:expr, $stride:expr) => {
        asm!(concat!("tileloadd tmm", $t, ", [{at} + {stride}*1]"), at = in(reg) $at,
             stride = in(reg) $stride, options(readonly, nostack, preserves_flags))
    };
    (store $t:literal, $at:expr, $stride:expr) => {
        asm!(concat!("tilestored [{at} + {stride}*1], tmm", $t), at = in(reg) $at,
             stride = in(reg) $stride, options(nostack, preserves_flags))
    };
    (dot $c:literal, $a:literal, $b:literal) => {
        asm!(concat!("tdpbf16ps tmm", $c, ", tmm", $a, ", tmm", $b), options(nomem, nostack, preserves_flags))
    };
}

/// Tile registers configured on this thread; released at the end, so that the system need not save them.
pub(super) struct AmxTiles(());

impl Drop for AmxTiles {
    fn drop(&mut self) {
        // SAFETY: a session exists only where AMX does.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
    }
}

impl GemmKernel for Amx {
    type Cell = bf16;
    const ROWS: usize = 2 * TILE;
    const COLS: usize = 2 * TILE;
    const UNIT: usize = STEP;
    const DEPTH: usize = 512;
    const SLAB: usize = 2048;
    const EXACT: bool = false;
    type Session = AmxTiles;

    fn begin(self) -> AmxTiles {
        /// Palette 1; eight tiles of 16 rows of 64 bytes.
        #[repr(C, align(64))]
        struct TileConfig {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        static CONFIG: TileConfig = TileConfig {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
            rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
        };
        // SAFETY: the proof was made after the system had granted the tiles; the 64 bytes are there.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(readonly, nostack, preserves_flags)) };
        AmxTiles(())
    }

    /// Four tiles of sums keep the unit busy: 2 x 2, or 4 x 1 where there is but one tile of columns.
    fn rows(cols: usize) -> usize {
        if cols > TILE { 2 * TILE } else { 4 * TILE }
    }

    /// Whole tiles with contiguous depth can be loaded with the matrix's own stride.
    fn in_place<T: Float>(a: PackSource<T>, rows: usize, depth: usize) -> Option<PackedRows<bf16>> {
        let lies_well = a.depth == 1 && rows.is_multiple_of(TILE) && depth.is_multiple_of(STEP);
        lies_well.then(|| PackedRows { at: a.at.cast(), row: a.outer, step: STEP, tile: TILE * a.outer })
    }

    fn packed(at: *const bf16, padded: usize) -> PackedRows<bf16> {
        PackedRows { at, row: STEP, step: AREA, tile: TILE * padded }
    }

    unsafe fn pack_a<T: Float>(a: PackSource<T>, rows: usize, depth: usize, padded: usize, out: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { pack::<T, false>(a, rows, 0, depth, padded, out) }
    }

    unsafe fn pack_b<T: Float>(
        b: PackSource<T>,
        cols: usize,
        from: usize,
        to: usize,
        padded: usize,
        out: *mut bf16,
    ) {
        // SAFETY: the caller's promise.
        unsafe { pack::<T, true>(b, cols, from, to, padded, out) }
    }

    fn depth_offset(p: usize, _cols: usize) -> usize {
        p * TILE
    }

    unsafe fn tile(
        rows: usize,
        cols: usize,
        depth: usize,
        a: PackedRows<bf16>,
        b: *const bf16,
        b_padded: usize,
        c: *mut f32,
        c_stride: usize,
        add: bool,
    ) {
        let steps = depth.div_ceil(STEP);
        // SAFETY: the caller's promise: operands hold whole tiles, and `c` has room for them.
        unsafe {
            match (cols > TILE, rows.div_ceil(TILE)) {
                (true, 1) => wide::<1>(steps, a, b, b_padded, c, c_stride, add),
                (true, _) => wide::<2>(steps, a, b, b_padded, c, c_stride, add),
                (false, 1) => narrow::<1>(steps, a, b, c, c_stride, add),
                (false, 2) => narrow::<2>(steps, a, b, c, c_stride, add),
                (false, 3) => narrow::<3>(steps, a, b, c, c_stride, add),
                (false, _) => narrow::<4>(steps, a, b, c, c_stride, add),
            }
        }
    }
}

/// `R` x 2 tiles of sums.
///
/// # Safety
/// Tiles are configured on this thread; `a` and `b` hold `steps` packed steps, and `c` can be read and
/// written for `R` x 2 tiles.
unsafe fn wide<const R: usize>(
    steps: usize,
    a: PackedRows<bf16>,
    b: *const bf16,
    b_padded: usize,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    let (a_stride, b_stride, stride) = (2 * a.row, 4 * TILE, 4 * c_stride);
    let (mut a0, mut a1) = (a.at, a.at.wrapping_add(a.tile));
    let (mut b0, mut b1) = (b, b.wrapping_add(TILE * b_padded));
    let c1 = c.wrapping_add(TILE * c_stride);
    // SAFETY: the caller's promise.
    unsafe {
        if add {
            tile!(load 0, c, stride);
            tile!(load 1, c.add(TILE), stride);
            if R > 1 {
                tile!(load 2, c1, stride);
                tile!(load 3, c1.add(TILE), stride);
            }
        } else {
            tile!(zero 0);
            tile!(zero 1);
            tile!(zero 2);
            tile!(zero 3);
        }
        for _ in 0..steps {
            tile!(load 6, b0, b_stride);
            tile!(load 4, a0, a_stride);
            tile!(load 7, b1, b_stride);
            tile!(dot 0, 4, 6);
            tile!(dot 1, 4, 7);
            if R > 1 {
                tile!(load 5, a1, a_stride);
                tile!(dot 2, 5, 6);
                tile!(dot 3, 5, 7);
            }
            (a0, a1) = (a0.wrapping_add(a.step), a1.wrapping_add(a.step));
            (b0, b1) = (b0.wrapping_add(AREA), b1.wrapping_add(AREA));
        }
        tile!(store 0, c, stride);
        tile!(store 1, c.add(TILE), stride);
        if R > 1 {
            tile!(store 2, c1, stride);
            tile!(store 3, c1.add(TILE), stride);
        }
    }
}

/// `R` x 1 tiles of sums.
///
/// # Safety
/// As for `wide`, with `R` x 1 tiles.
unsafe fn narrow<const R: usize>(
    steps: usize,
    a: PackedRows<bf16>,
    b: *const bf16,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    let (a_stride, b_stride, stride) = (2 * a.row, 4 * TILE, 4 * c_stride);
    let (mut a0, mut b0) = (a.at, b);
    let row = |r: usize| c.wrapping_add(r * TILE * c_stride);
    // SAFETY: the caller's promise.
    unsafe {
        tile!(zero 0);
        tile!(zero 1);
        tile!(zero 2);
        tile!(zero 3);
        if add {
            tile!(load 0, row(0), stride);
            if R > 1 {
                tile!(load 1, row(1), stride);
            }
            if R > 2 {
                tile!(load 2, row(2), stride);
            }
            if R > 3 {
                tile!(load 3, row(3), stride);
            }
        }
        for _ in 0..steps {
            tile!(load 7, b0, b_stride);
            tile!(load 4, a0, a_stride);
            tile!(dot 0, 4, 7);
            if R > 1 {
                tile!(load 5, a0.wrapping_add(a.tile), a_stride);
                tile!(dot 1, 5, 7);
            }
            if R > 2 {
                tile!(load 6, a0.wrapping_add(2 * a.tile), a_stride);
                tile!(dot 2, 6, 7);
            }
            if R > 3 {
                tile!(load 4, a0.wrapping_add(3 * a.tile), a_stride);
                tile!(dot 3, 4, 7);
            }
            (a0, b0) = (a0.wrapping_add(a.step), b0.wrapping_add(AREA));
        }
        tile!(store 0, row(0), stride);
        if R > 1 {
            tile!(store 1, row(1), stride);
        }
        if R > 2 {
            tile!(store 2, row(2), stride);
        }
        if R > 3 {
            tile!(store 3, row(3), stride);
        }
    }
}

/// Packs depth `from..to` of `count` rows (columns) into blocks of [row, pair], or [pair, row] if `PAIR_FIRST`.
///
/// # Safety
/// The processor has AVX-512; `source` can be read at all of these, and `out` can be written for all blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn pack<T: Float, const PAIR_FIRST: bool>(
    source: PackSource<T>,
    count: usize,
    from: usize,
    to: usize,
    padded: usize,
    out: *mut bf16,
) {
    assert_eq!(T::DTYPE, DType::Bf16, "AMX multiplies bf16");
    let source = PackSource { at: source.at.cast::<bf16>(), outer: source.outer, depth: source.depth };
    let one = |i: usize, p: usize| {
        let (rows, depth) = ((count - i).min(TILE), (to - p).min(STEP));
        // SAFETY: the caller's promise: the block's rows and depth exist, and `out` holds all blocks.
        unsafe {
            let (block, pair_first) = load_block(source.from(i, p), rows, depth);
            let block = if pair_first == PAIR_FIRST { block } else { transpose(block) };
            let at = out.add(i * padded + p * TILE);
            for (l, line) in block.into_iter().enumerate() {
                _mm512_storeu_si512(at.add(l * STEP).cast(), line);
            }
        }
    };
    // Walk along what is contiguous, so that the processor sees the next lines coming.
    if source.depth == 1 {
        (0..count).step_by(TILE).for_each(|i| (from..to).step_by(STEP).for_each(|p| one(i, p)));
    } else {
        (from..to).step_by(STEP).for_each(|p| (0..count).step_by(TILE).for_each(|i| one(i, p)));
    }
}

/// `rows` x `depth` of a source as 16 x 16 pairs of depth, zeros beyond; and whether pairs are the first index.
///
/// # Safety
/// The processor has AVX-512; `source` can be read for `rows` x `depth`, which are at most a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn load_block(source: PackSource<bf16>, rows: usize, depth: usize) -> ([__m512i; 16], bool) {
    // SAFETY: the caller's promise; loads are masked at the edges.
    unsafe {
        let mut block = [_mm512_setzero_si512(); 16];
        if source.depth == 1 {
            let lanes = if depth == STEP { !0 } else { (1u32 << depth) - 1 };
            for r in 0..rows {
                block[r] = _mm512_maskz_loadu_epi16(lanes, source.at.add(r * source.outer).cast());
            }
            return (block, false);
        }
        let line = |p: usize| {
            if p >= depth {
                _mm256_setzero_si256()
            } else if source.outer == 1 {
                _mm256_maskz_loadu_epi16(first(rows), source.at.add(p * source.depth).cast())
            } else {
                let mut line = [bf16::ZERO; TILE];
                (0..rows).for_each(|r| line[r] = *source.from(r, p).at);
                _mm256_loadu_si256(line.as_ptr().cast())
            }
        };
        for pair in 0..depth.div_ceil(2) {
            let (even, odd) = (line(2 * pair), line(2 * pair + 1));
            block[pair] = _mm512_or_si512(
                _mm512_cvtepu16_epi32(even),
                _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd)),
            );
        }
        (block, true)
    }
}
