//! Sums and maxima of rows that vectorise.
//!
//! The compiler may not reorder a sum of floats. These fix an order with room for vectors: `LANES` interleaved
//! partial results, folded by halves at the end. It is the same order on every instruction set.

use std::ops::AddAssign;

use super::math;
use crate::dtype::Float;

/// How many partial results run beside each other: two vectors of AVX-512, eight of SSE.
pub(crate) const LANES: usize = 32;

/// The sum of `f(x)` over a row; `A` is f32, or f64 where more digits are wanted.
#[inline(always)]
pub fn sum<T: Float, A: Copy + Default + AddAssign>(x: &[T], f: impl Fn(f32) -> A) -> A {
    let mut lanes = [A::default(); LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for x in chunks {
        for l in 0..LANES {
            lanes[l] += f(x[l].to_f32());
        }
    }
    // The rest has an array of its own: `lanes` stays in registers only while its indices are constants.
    let mut last = [A::default(); LANES];
    for (last, x) in last.iter_mut().zip(rest) {
        *last = f(x.to_f32());
    }
    fold(lanes, last)
}

/// The sum of `f(a, b)` over two rows of one length.
#[inline(always)]
pub(crate) fn sum2<T: Float, U: Float, A: Copy + Default + AddAssign>(
    a: &[T],
    b: &[U],
    f: impl Fn(f32, f32) -> A,
) -> A {
    assert_eq!(a.len(), b.len());
    let mut lanes = [A::default(); LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            lanes[l] += f(a[l].to_f32(), b[l].to_f32());
        }
    }
    let mut last = [A::default(); LANES];
    for ((last, a), b) in last.iter_mut().zip(a_rest).zip(b_rest) {
        *last = f(a.to_f32(), b.to_f32());
    }
    fold(lanes, last)
}

/// The sum of `f(a, b, c)` over three rows of one length.
#[inline(always)]
pub(crate) fn sum3<T: Float, U: Float, V: Float, A: Copy + Default + AddAssign>(
    a: &[T],
    b: &[U],
    c: &[V],
    f: impl Fn(f32, f32, f32) -> A,
) -> A {
    assert!(a.len() == b.len() && a.len() == c.len());
    let mut lanes = [A::default(); LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let (c, c_rest) = c.as_chunks::<LANES>();
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for l in 0..LANES {
            lanes[l] += f(a[l].to_f32(), b[l].to_f32(), c[l].to_f32());
        }
    }
    let mut last = [A::default(); LANES];
    for (((last, a), b), c) in last.iter_mut().zip(a_rest).zip(b_rest).zip(c_rest) {
        *last = f(a.to_f32(), b.to_f32(), c.to_f32());
    }
    fold(lanes, last)
}

/// The sum of e^(x - max) over a row, 4096 at a time in f32 and those sums in f64: a vocabulary is long.
///
/// Not [`sum`] with a closure: the exponential is long enough that the compiler would leave it as a call.
#[inline(always)]
pub(crate) fn sum_exp<T: Float>(x: &[T], max: f32) -> f64 {
    let mut sum = 0.0;
    for x in x.chunks(4096) {
        let mut lanes = [0f32; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for x in chunks {
            for l in 0..LANES {
                lanes[l] += math::exp(x[l].to_f32() - max);
            }
        }
        let mut last = [0f32; LANES];
        for (last, x) in last.iter_mut().zip(rest) {
            *last = math::exp(x.to_f32() - max);
        }
        sum += f64::from(fold(lanes, last));
    }
    sum
}

/// The largest element; NaNs are passed over, and an empty row has -infinity.
#[inline(always)]
pub fn max<T: Float>(x: &[T]) -> f32 {
    #[inline(always)]
    fn larger(a: f32, b: f32) -> f32 {
        if b > a { b } else { a }
    }
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for x in chunks {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], x[l].to_f32());
        }
    }
    let last = rest.iter().fold(f32::NEG_INFINITY, |m, x| larger(m, x.to_f32()));
    lanes.into_iter().fold(last, larger)
}

#[inline(always)]
fn fold<A: Copy + AddAssign>(mut lanes: [A; LANES], last: [A; LANES]) -> A {
    for l in 0..LANES {
        lanes[l] += last[l];
    }
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            let upper = lanes[l + half];
            lanes[l] += upper;
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_every_length_are_summed_whole() {
        for n in 0..100usize {
            let x: Vec<f32> = (0..n).map(|i| i as f32 - 7.0).collect();
            let exact: f64 = x.iter().map(|&x| f64::from(x)).sum();
            assert_eq!(f64::from(sum(&x, |x| x)), exact);
            assert_eq!(sum2(&x, &x, |a, b| f64::from(2.0 * a - b)), exact);
            assert_eq!(sum3(&x, &x, &x, |a, b, c| f64::from(a + b - c)), exact);
            assert_eq!(max(&x), x.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
        let long: Vec<f32> = (0..9000).map(|i| i as f32 / 9000.0).collect();
        let exact: f64 = long.iter().map(|&x| f64::from(x - 1.0).exp()).sum();
        assert!((sum_exp(&long, 1.0) / exact - 1.0).abs() < 1e-7);
        assert_eq!(max(&[f32::NAN, -3.0, f32::NAN]), -3.0);
    }
}
