//! The f32 kernel in plain Rust, for processors of which nothing is known: 4 x 8 sums, which the compiler
//! keeps in whatever vectors its base target has.

use super::engine::{GemmKernel, Lanes, PackedRows, float_engine, registers};
use super::pack::{self, PackSource};
use crate::dtype::{DType, Float};

type Vec4 = [f32; 4];

impl Lanes for Vec4 {
    const N: usize = 4;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Vec4 {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Vec4 {
        // SAFETY: the caller's promise, here and below.
        unsafe { from.cast::<Vec4>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, n: usize) -> Vec4 {
        // SAFETY: as above.
        std::array::from_fn(|i| if i < n { unsafe { *from.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { to.cast::<Vec4>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, n: usize) {
        for i in 0..n {
            // SAFETY: as above.
            unsafe { *to.add(i) = self[i] };
        }
    }
    #[inline(always)]
    unsafe fn add_product(self, x: Vec4, y: Vec4) -> Vec4 {
        // Not `mul_add`: without the instruction it is a call to a slow exact function. Nor `from_fn`, whose
        // closure is a call where the compiler looks at one piece of the crate at a time.
        let mut sum = self;
        for i in 0..4 {
            sum[i] += x[i] * y[i];
        }
        sum
    }
}

/// f32 in plain Rust, which every processor runs: it needs no proof.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

float_engine! {
    Portable, Vec4, features: [], rows: 4, each: [1 2 3 4], depth: 256, slab: 1024, pack: pack::panel
}
