//! temp
#![allow(missing_docs)]
#![allow(clippy::missing_safety_doc)]
use std::arch::x86_64::*;

/// A vector of f32.
pub trait Lanes: Copy {
    /// How many.
    const N: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// The first `n` only; zeros after them.
    unsafe fn load_part(from: *const f32, n: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// The first `n` only.
    unsafe fn store_part(self, to: *mut f32, n: usize);
    /// `self + x y`.
    unsafe fn add_product(self, x: Self, y: Self) -> Self;
}

/// Ones for the first `n` of 16 lanes.
#[inline(always)]
fn first(n: usize) -> __mmask16 {
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
    unsafe fn load_part(from: *const f32, n: usize) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_maskz_loadu_ps(first(n), from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize) {
        // SAFETY: see above.
        unsafe { _mm512_mask_storeu_ps(to, first(n), self) }
    }
    #[inline(always)]
    unsafe fn add_product(self, x: __m512, y: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(x, y, self) }
    }
}

/// Ones for the first `n` of 8 lanes.
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
    unsafe fn load_part(from: *const f32, n: usize) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_maskload_ps(from, mask(n)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize) {
        // SAFETY: see above.
        unsafe { _mm256_maskstore_ps(to, mask(n), self) }
    }
    #[inline(always)]
    unsafe fn add_product(self, x: __m256, y: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(x, y, self) }
    }
}

type Four = [f32; 4];

impl Lanes for Four {
    const N: usize = 4;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Four {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Four {
        // SAFETY: the caller's promise, here and below.
        unsafe { from.cast::<Four>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_part(from: *const f32, n: usize) -> Four {
        // SAFETY: as above.
        std::array::from_fn(|i| if i < n { unsafe { *from.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { to.cast::<Four>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize) {
        for i in 0..n {
            // SAFETY: as above.
            unsafe { *to.add(i) = self[i] };
        }
    }
    #[inline(always)]
    unsafe fn add_product(self, x: Four, y: Four) -> Four {
        // Not `mul_add`: without the instruction it is a call to a slow exact function.
        std::array::from_fn(|i| self[i] + x[i] * y[i])
    }
}
