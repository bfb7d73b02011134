//! The f32 kernel in plain Rust, for processors of which nothing is known: 4 x 8 sums, which the compiler
//! keeps in whatever vectors its base target has.

use super::engine::{Engine, Lanes, Rows, float_engine, registers};
use super::pack::{self, Source};
use crate::dtype::{DType, Float};

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
        // Not `mul_add`: without the instruction it is a call to a slow exact function. Nor `from_fn`, whose closure is a call where
        // the compiler looks at one piece of the crate at a time.
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
    Portable, Four, features: [], rows: 4, each: [1 2 3 4], depth: 256, slab: 1024, pack: pack::panel
}
