//! The f32 kernel with AVX-512: 14 x 32 sums in 28 of the 32 registers, and packing by 16 x 16 transposition.

use std::arch::x86_64::*;

use super::engine::{GemmKernel, Lanes, PackedRows, float_engine, registers};
use super::pack::{self, PackSource};
use crate::bf16;
use crate::cpu::isa::Avx512;
use crate::dtype::{DType, Float};

/// Ones for the first `n` of 16 lanes.
#[inline(always)]
pub(super) fn first(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

// SAFETY (of every body): the caller is compiled for AVX-512 and passes pointers that hold the lanes.
impl Lanes for __m512 {
    const N: usize = 16;
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, n: usize) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_maskz_loadu_ps(first(n), from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, n: usize) {
        // SAFETY: see above.
        unsafe { _mm512_mask_storeu_ps(to, first(n), self) }
    }
    #[inline(always)]
    unsafe fn add_product(self, x: __m512, y: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(x, y, self) }
    }
}

/// `n` elements (at most 16) as f32, zeros after them.
///
/// # Safety
/// The caller is compiled for AVX-512, and `from` holds `n` elements.
#[inline(always)]
unsafe fn load<T: Float>(from: *const T, n: usize) -> __m512 {
    // SAFETY: as for `Lanes`; masked lanes are not touched.
    unsafe {
        match T::DTYPE {
            DType::F32 => _mm512_maskz_loadu_ps(first(n), from.cast()),
            _ => {
                let half = _mm256_maskz_loadu_epi16(first(n), from.cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
            }
        }
    }
}

/// Transposes 16 x 16 lanes of 32 bits: pairs, then fours, then the 128-bit quarters twice.
///
/// # Safety
/// The caller is compiled for AVX-512.
#[inline(always)]
pub(crate) unsafe fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: as for `Lanes`; registers only.
    unsafe {
        let mut t = r;
        for i in (0..16).step_by(2) {
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        }
        let mut u = t;
        for i in (0..16).step_by(4) {
            u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        // u[4g + c] holds, in quarter q, column 4q + c of rows 4g .. 4g + 3.
        let mut out = u;
        for c in 0..4 {
            let low = _mm512_shuffle_i32x4::<0x88>(u[c], u[4 + c]);
            let high = _mm512_shuffle_i32x4::<0x88>(u[8 + c], u[12 + c]);
            out[c] = _mm512_shuffle_i32x4::<0x88>(low, high);
            out[8 + c] = _mm512_shuffle_i32x4::<0xdd>(low, high);
            let low = _mm512_shuffle_i32x4::<0xdd>(u[c], u[4 + c]);
            let high = _mm512_shuffle_i32x4::<0xdd>(u[8 + c], u[12 + c]);
            out[4 + c] = _mm512_shuffle_i32x4::<0x88>(low, high);
            out[12 + c] = _mm512_shuffle_i32x4::<0xdd>(low, high);
        }
        out
    }
}

/// As [`pack::panel`].
///
/// # Safety
/// As for it, and the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn pack_panel<T: Float>(
    source: PackSource<T>,
    count: usize,
    width: usize,
    depth: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's promise; loads and stores are masked at the edges.
    unsafe {
        if source.outer == 1 {
            for p in 0..depth {
                for i in (0..width).step_by(16) {
                    let x = load(source.at.add(p * source.depth + i), count.saturating_sub(i).min(16));
                    _mm512_mask_storeu_ps(out.add(p * width + i), first((width - i).min(16)), x);
                }
            }
        } else if source.depth == 1 {
            for i in (0..width).step_by(16) {
                for p in (0..depth).step_by(16) {
                    let steps = (depth - p).min(16);
                    let mut block = [_mm512_setzero_si512(); 16];
                    for r in 0..count.saturating_sub(i).min(16) {
                        block[r] =
                            _mm512_castps_si512(load(source.at.add((i + r) * source.outer + p), steps));
                    }
                    let block = transpose(block);
                    let lanes = first((width - i).min(16));
                    for (s, x) in block.into_iter().enumerate().take(steps) {
                        let to = out.add((p + s) * width + i);
                        _mm512_mask_storeu_ps(to, lanes, _mm512_castsi512_ps(x));
                    }
                }
            }
        } else {
            pack::panel(source, count, width, depth, out)
        }
    }
}

/// Rounds `rows` x `cols` sums to bf16, as `Float::from_f32` does.
///
/// With `stream`, whole cache lines go past the caches: `c` is too large to stay in them, and a line that is
/// overwritten entirely need not be fetched first.
///
/// # Safety
/// The processor has AVX-512; both matrices hold what is named.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn round(
    sums: *const f32,
    stride: usize,
    rows: usize,
    cols: usize,
    out: *mut bf16,
    out_stride: usize,
    stream: bool,
) {
    let half = |x: __m512| {
        let bits = _mm512_castps_si512(x);
        let high = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        let up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, up));
        let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet))
    };
    // SAFETY: the caller's promise; loads and stores are masked at the edges.
    unsafe {
        if stream && cols == 32 && out.addr().is_multiple_of(64) && out_stride.is_multiple_of(32) {
            for r in 0..rows {
                let (from, to) = (sums.add(r * stride), out.add(r * out_stride));
                let (low, high) = (half(_mm512_loadu_ps(from)), half(_mm512_loadu_ps(from.add(16))));
                let line = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                _mm512_stream_si512(to.cast(), line);
            }
            return;
        }
        for r in 0..rows {
            for j in (0..cols).step_by(16) {
                let lanes = first((cols - j).min(16));
                let x = half(_mm512_maskz_loadu_ps(lanes, sums.add(r * stride + j)));
                _mm256_mask_storeu_epi16(out.add(r * out_stride + j).cast(), lanes, x);
            }
        }
    }
}

/// Makes streamed lines visible to whoever is told that the task is done.
pub(super) fn fence() {
    // SAFETY: every x86-64 processor has it; it touches no memory.
    unsafe { _mm_sfence() }
}

float_engine! {
    Avx512, __m512, features: ["avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"], rows: 14,
    each: [1 2 3 4 5 6 7 8 9 10 11 12 13 14], depth: 256, slab: 1024, pack: pack_panel
}
