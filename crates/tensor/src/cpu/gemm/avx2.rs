//! The f32 kernel with AVX2 and FMA: 6 x 16 sums in 12 of the 16 registers.

use std::arch::x86_64::*;

use super::engine::{GemmKernel, Lanes, PackedRows, float_engine, registers};
use super::pack::{self, PackSource};
use crate::cpu::isa::Avx2;
use crate::dtype::{DType, Float};

/// Ones for the first `n` of 8 lanes.
///
/// # Safety
/// The caller is compiled for AVX, and `n` is at most 8.
#[inline(always)]
unsafe fn mask(n: usize) -> __m256i {
    const WINDOW: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: n is at most 8.
    unsafe { _mm256_loadu_si256(WINDOW.as_ptr().add(8 - n).cast()) }
}

// SAFETY (of every body): the caller is compiled for AVX2 and FMA and passes pointers that hold the lanes.
impl Lanes for __m256 {
    const N: usize = 8;
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, n: usize) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_maskload_ps(from, mask(n)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, n: usize) {
        // SAFETY: see above.
        unsafe { _mm256_maskstore_ps(to, mask(n), self) }
    }
    #[inline(always)]
    unsafe fn add_product(self, x: __m256, y: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(x, y, self) }
    }
}

/// The plain packing, compiled for AVX2.
///
/// # Safety
/// As for [`pack::panel`], and the processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
unsafe fn pack_panel<T: Float>(
    source: PackSource<T>,
    count: usize,
    width: usize,
    depth: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe { pack::panel(source, count, width, depth, out) }
}

float_engine! {
    Avx2, __m256, features: ["avx2,fma"], rows: 6, each: [1 2 3 4 5 6], depth: 384, slab: 1536,
    pack: pack_panel
}
