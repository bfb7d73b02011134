//! Elementary functions that vectorise: branch-free, accurate to a few units in the last place of an f32.

/// e^x. Cephes' polynomial on [-ln 2 / 2, ln 2 / 2]; below -87.3, where f32 would turn subnormal, it is 0.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // At 89 the product below overflows to infinity by itself, and a NaN stays one through all of it.
    let clamped = x.clamp(-87.3, 89.0);
    // Adding 1.5 x 2^23 leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-355.0 / 512.0, clamped));
    let mut p = 1.987_569_1e-4f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 5.000_000_3e-1);
    let y = p.mul_add(r * r, r) + 1.0;
    // n is at most 128, whose power of two does not fit an exponent: scale in two halves.
    let half = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32) >> 1;
    let rest = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32) - half;
    let scale = |e: i32| f32::from_bits(((e + 127) << 23) as u32);
    let y = y * scale(half) * scale(rest);
    if x < -87.3 { 0.0 } else { y }
}

/// tanh x, from e^(2x); exact at 0, saturating at both ends.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // For small |x| the quotient would lose digits: an odd polynomial takes over.
    let x2 = x * x;
    let mut p = -5.704_988_7e-3f32;
    p = p.mul_add(x2, 2.063_909e-2);
    p = p.mul_add(x2, -5.373_971_5e-2);
    p = p.mul_add(x2, 1.333_144_2e-1);
    p = p.mul_add(x2, -3.333_328e-1);
    let small = (p * x2).mul_add(x, x);
    // A comparison, not `min`, so that a NaN passes.
    let e = exp(2.0 * if x.abs() > 10.0 { 10.0 } else { x.abs() });
    let large = (1.0 - 2.0 / (e + 1.0)).copysign(x);
    if x.abs() < 0.625 { small } else { large }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(f: fn(f32) -> f32, exact: fn(f64) -> f64, from: f32, to: f32) -> f64 {
        let n = 200_000;
        (0..=n)
            .map(|i| from + (to - from) * i as f32 / n as f32)
            .map(|x| ((f(x) as f64 - exact(x as f64)) / exact(x as f64).abs().max(1e-30)).abs())
            .fold(0.0, f64::max)
    }

    #[test]
    fn exp_and_tanh_are_accurate() {
        assert!(worst(exp, f64::exp, -87.0, 88.7) < 2e-7);
        assert!(worst(tanh, f64::tanh, 1e-4, 12.0) < 3e-7);
        assert_eq!((exp(0.0), exp(-200.0), exp(200.0)), (1.0, 0.0, f32::INFINITY));
        assert_eq!(
            (exp(88.8), exp(f32::INFINITY), exp(f32::NEG_INFINITY)),
            (f32::INFINITY, f32::INFINITY, 0.0)
        );
        assert_eq!((tanh(0.0), tanh(50.0), tanh(-50.0)), (0.0, 1.0, -1.0));
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
    }
}
