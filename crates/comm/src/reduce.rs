//! Reductions over ranks on the host: plain loops that vectorise, in the order of ranks and no other.
//!
//! x: one slice a rank, all of one length; y: where the result goes. Every element is `((x0 + x1) + x2) + ..`
//! whichever thread computes it and however the slices are cut, so that the same call gives the same bits
//! every time.

use std::slice;

use bytemuck::{Pod, Zeroable};
use espalier_tensor::cpu::Isa;
use espalier_tensor::{bf16, simd};

use crate::call::Reduce;

/// An element that can be reduced: widened, combined, and rounded once at the end.
pub(crate) trait Reducible: Pod {
    /// What it is combined in.
    type Wide: Pod;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn sum(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! reducible {
    ($type:ty, $wide:ty, $widen:expr, $narrow:expr, |$a:ident, $b:ident| $sum:expr, $max:expr) => {
        impl Reducible for $type {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> $type {
                $narrow(wide)
            }
            #[inline(always)]
            fn sum($a: $wide, $b: $wide) -> $wide {
                $sum
            }
            #[inline(always)]
            fn max($a: $wide, $b: $wide) -> $wide {
                $max
            }
        }
    };
}

/// A NaN of any rank must show.
macro_rules! float {
    ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {
        reducible!($type, $wide, $widen, $narrow, |a, b| a + b, if b > a || b.is_nan() { b } else { a });
    };
}

float!(f32, f32, |x| x, |x| x);
float!(f64, f64, |x| x, |x| x);
float!(bf16, f32, espalier_tensor::Float::to_f32, espalier_tensor::Float::from_f32);

reducible!(u32, u32, |x| x, |x| x, |a, b| a.wrapping_add(b), a.max(b));
reducible!(u64, u64, |x| x, |x| x, |a, b| a.wrapping_add(b), a.max(b));

/// How two become one.
trait Combine {
    fn combine<T: Reducible>(a: T::Wide, b: T::Wide) -> T::Wide;
}

struct SumOp;

impl Combine for SumOp {
    #[inline(always)]
    fn combine<T: Reducible>(a: T::Wide, b: T::Wide) -> T::Wide {
        T::sum(a, b)
    }
}

struct MaxOp;

impl Combine for MaxOp {
    #[inline(always)]
    fn combine<T: Reducible>(a: T::Wide, b: T::Wide) -> T::Wide {
        T::max(a, b)
    }
}

simd! {
    /// `total = a`
    fn widen[T: Reducible](total: &mut [T::Wide], a: &[T]) {
        for (total, a) in total.iter_mut().zip(a) {
            *total = a.widen();
        }
    }

    /// `total = a + b`
    fn first[C: Combine, T: Reducible](total: &mut [T::Wide], a: &[T], b: &[T]) {
        for ((total, a), b) in total.iter_mut().zip(a).zip(b) {
            *total = C::combine::<T>(a.widen(), b.widen());
        }
    }

    /// `total += a`
    fn one[C: Combine, T: Reducible](total: &mut [T::Wide], a: &[T]) {
        for (total, a) in total.iter_mut().zip(a) {
            *total = C::combine::<T>(*total, a.widen());
        }
    }

    /// `total = (total + a) + b`: two ranks a pass, since a pass costs more than an addition.
    fn two[C: Combine, T: Reducible](total: &mut [T::Wide], a: &[T], b: &[T]) {
        for ((total, a), b) in total.iter_mut().zip(a).zip(b) {
            *total = C::combine::<T>(C::combine::<T>(*total, a.widen()), b.widen());
        }
    }

    /// `y = total`, rounded
    fn narrow[T: Reducible](total: &[T::Wide], y: &mut [T]) {
        for (y, total) in y.iter_mut().zip(total) {
            *y = T::narrow(*total);
        }
    }
}

/// Elements that are reduced at a time: their total, and what was read, stay in the nearest cache.
const CHUNK: usize = 1024;

/// Combines `len` elements of every `x`, in their order, and writes the result to every `y`.
///
/// # Safety
/// Every address is aligned and valid for `len` elements, and nobody else uses them meanwhile. A `y` may be
/// one of the `x`; otherwise they do not overlap.
pub(crate) unsafe fn reduce<T: Reducible>(how: Reduce, x: &[*const T], y: &[*mut T], len: usize) {
    // SAFETY: what the caller promises.
    unsafe {
        match how {
            Reduce::Sum => combine::<SumOp, T>(x, y, len),
            Reduce::Max => combine::<MaxOp, T>(x, y, len),
        }
    }
}

/// The same of few numbers that were gathered: `all` has those of each rank, `n` of them, one rank's after
/// the other's.
pub(crate) fn reduce_gathered<T: Reducible>(how: Reduce, all: &[T], n: usize) -> Vec<T> {
    let ranks = all.len() / n.max(1);
    let one = |i: usize| {
        let of = |rank: usize| all[rank * n + i].widen();
        T::narrow((1..ranks).fold(of(0), |total, rank| match how {
            Reduce::Sum => T::sum(total, of(rank)),
            Reduce::Max => T::max(total, of(rank)),
        }))
    };
    (0..n).map(one).collect()
}

/// # Safety
/// As for [`reduce`].
unsafe fn combine<C: Combine, T: Reducible>(x: &[*const T], y: &[*mut T], len: usize) {
    let isa = Isa::best();
    let mut total = [T::Wide::zeroed(); CHUNK];
    for at in (0..len).step_by(CHUNK) {
        let total = &mut total[..CHUNK.min(len - at)];
        let n = total.len();
        // SAFETY: `at + n` is at most `len`; nothing is written while such a slice is in use.
        let read = |x: &*const T| unsafe { slice::from_raw_parts(x.add(at), n) };
        let rest = match x {
            [a, b, rest @ ..] => {
                first::<C, T>(isa, total, read(a), read(b));
                rest
            }
            [a] => {
                widen(isa, total, read(a));
                &[]
            }
            [] => panic!("nobody to reduce"),
        };
        let (pairs, last) = rest.as_chunks::<2>();
        for [a, b] in pairs {
            two::<C, T>(isa, total, read(a), read(b));
        }
        for a in last {
            one::<C, T>(isa, total, read(a));
        }
        let Some((first, others)) = y.split_first() else { continue };
        // SAFETY: as above; nothing of `x` is borrowed any more, and different `y` do not overlap.
        unsafe {
            narrow(isa, total, slice::from_raw_parts_mut(first.add(at), n));
            others.iter().for_each(|y| std::ptr::copy_nonoverlapping(first.add(at), y.add(at), n));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Reducible>(how: Reduce, x: &[&[T]]) -> Vec<T> {
        let mut y = vec![T::zeroed(); x[0].len()];
        assert!(x.iter().all(|x| x.len() == y.len()));
        let addresses: Vec<_> = x.iter().map(|x| x.as_ptr()).collect();
        // SAFETY: all have the length of `y`, which is new.
        unsafe { reduce(how, &addresses, &[y.as_mut_ptr()], y.len()) };
        y
    }

    /// In place and of every length, so that whole blocks and what is left over are both met.
    #[test]
    fn all_elements_are_reduced() {
        for n in 0..100usize {
            let mut x: Vec<Vec<u32>> = (0..3).map(|r| (0..n as u32).map(|i| i * 10 + r).collect()).collect();
            let y: Vec<_> = x.iter_mut().map(|x| x.as_mut_ptr()).collect();
            let read: Vec<_> = y.iter().map(|y| y.cast_const()).collect();
            // SAFETY: three vectors of `n` elements.
            unsafe { reduce(Reduce::Sum, &read, &y, n) };
            let expected: Vec<u32> = (0..n as u32).map(|i| 30 * i + 3).collect();
            assert!(x.iter().all(|x| *x == expected));
        }
    }

    /// 1e8 + 1 is 1e8 in f32: the order of ranks shows in the bits.
    #[test]
    fn the_order_is_that_of_ranks() {
        let x: [&[f32]; 3] = [&[1e8, 1.0, -1e8], &[-1e8, 1e8, 1.0], &[1.0, -1e8, 1e8]];
        assert_eq!(reduced(Reduce::Sum, &x), [1.0, 0.0, 0.0]);
        assert_eq!(reduce_gathered(Reduce::Sum, &x.concat(), 3), [1.0, 0.0, 0.0]);
        assert_eq!(reduce_gathered(Reduce::Max, &x.concat(), 3), [1e8, 1e8, 1e8]);
    }

    /// 256 + 1 is 256 in bf16, but 256 + 1 + 1 is not.
    #[test]
    fn bf16_is_rounded_once() {
        let x = [256.0, 1.0, 1.0].map(|x| [bf16::from_f32(x)]);
        assert_eq!(reduced(Reduce::Sum, &[&x[0], &x[1], &x[2]])[0].to_f32(), 258.0);
    }

    #[test]
    fn integers_wrap_and_nan_shows() {
        assert_eq!(reduced(Reduce::Sum, &[&[u32::MAX][..], &[3]]), [2]);
        assert_eq!(reduced(Reduce::Max, &[&[7u64, 1][..], &[3, u64::MAX]]), [7, u64::MAX]);
        assert_eq!(reduced(Reduce::Max, &[&[-3.0f64][..], &[-2.0]]), [-2.0]);
        for x in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            assert!(reduced(Reduce::Max, &[&x[..1], &x[1..]])[0].is_nan());
        }
    }
}
