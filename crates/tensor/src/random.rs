//! A counter-based generator: element `i` of stream `key` is a pure function of both, so any thread, rank or
//! second pass (recomputation, dropout's backward) finds the same number without storing it.
//!
//! The function is "Squares" (Widynski 2020), four rounds of squaring and swapping halves.

use crate::cpu::math::ln;

/// Mixes a seed and a purpose into a stream's key, an odd number without structure.
pub fn key(seed: u64, purpose: u64) -> u64 {
    mix(mix(seed).wrapping_add(purpose)) | 1
}

/// SplitMix64's step: a bijection that spreads every input bit over all output bits.
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 32 random bits: number `counter` of the stream.
#[inline(always)]
pub fn bits(key: u64, counter: u64) -> u32 {
    let y = counter.wrapping_mul(key);
    let z = y.wrapping_add(key);
    let mut x = y;
    x = x.wrapping_mul(x).wrapping_add(y).rotate_left(32);
    x = x.wrapping_mul(x).wrapping_add(z).rotate_left(32);
    x = x.wrapping_mul(x).wrapping_add(y).rotate_left(32);
    (x.wrapping_mul(x).wrapping_add(z) >> 32) as u32
}

/// A number in (0, 1): never 0 and never 1.
#[inline(always)]
pub fn uniform(key: u64, counter: u64) -> f64 {
    (f64::from(bits(key, counter)) + 0.5) / 4_294_967_296.0
}

/// A standard normal number, by inverting the distribution: one counter, one number.
pub fn normal(key: u64, counter: u64) -> f64 {
    normal_quantile(uniform(key, counter))
}

/// The x below which a standard normal variable lies with probability `p`
/// (Acklam's rational approximation, relative error below 1.2e-9).
pub fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969683028665376e+01,
        2.209460984245205e+02,
        -2.759285104469687e+02,
        1.38357751867269e+02,
        -3.066479806614716e+01,
        2.506628277459239e+00,
    ];
    const B: [f64; 5] = [
        -5.447609879822406e+01,
        1.615858368580409e+02,
        -1.556989798598866e+02,
        6.680131188771972e+01,
        -1.328068155288572e+01,
    ];
    const C: [f64; 6] = [
        -7.784894002430293e-03,
        -3.223964580411365e-01,
        -2.400758277161838e+00,
        -2.549732539343734e+00,
        4.374664141464968e+00,
        2.938163982698783e+00,
    ];
    const D: [f64; 4] =
        [7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00, 3.754408661907416e+00];
    let poly = |c: &[f64], x: f64| c.iter().fold(0.0, |sum, c| sum * x + c);
    let tail = |q: f64| poly(&C, q) / (poly(&D, q) * q + 1.0);
    if p < 0.02425 {
        tail((-2.0 * ln(p)).sqrt())
    } else if p > 1.0 - 0.02425 {
        -tail((-2.0 * ln(1.0 - p)).sqrt())
    } else {
        let q = p - 0.5;
        let r = q * q;
        poly(&A, r) * q / (poly(&B, r) * r + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_have_the_moments_of_their_distribution() {
        let k = key(7, 1);
        let n = 400_000u64;
        let (mut mean, mut square, mut fourth) = (0.0, 0.0, 0.0);
        for i in 0..n {
            let x = normal(k, i);
            mean += x / n as f64;
            square += x * x / n as f64;
            fourth += x.powi(4) / n as f64;
        }
        assert!(mean.abs() < 0.01 && (square - 1.0).abs() < 0.01 && (fourth - 3.0).abs() < 0.1);
        assert!((normal_quantile(0.975) - 1.959964).abs() < 1e-6);
    }

    #[test]
    fn neighbouring_seeds_and_purposes_do_not_correlate() {
        let n = 100_000;
        for (a, b) in [(key(0, 0), key(0, 1)), (key(0, 0), key(1, 0)), (key(3, 9), key(9, 3))] {
            let r: f64 = (0..n).map(|i| normal(a, i) * normal(b, i)).sum::<f64>() / n as f64;
            assert!(r.abs() < 0.015, "{r}");
        }
    }
}
