//! Elementary functions of our own: those in f32 vectorise, being branch-free, and are accurate to a few
//! units in the last place; those in f64 are there so that a number does not depend on the platform's
//! library, whose last bit changes with its version and, in one and the same library, with the instructions
//! that the processor has.

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

/// The error function, to 5e-7: Abramowitz and Stegun's 7.1.26.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let t = 1.0 / 0.327_591_1f32.mul_add(x.abs(), 1.0);
    let mut p = 1.061_405_4f32;
    p = p.mul_add(t, -1.453_152);
    p = p.mul_add(t, 1.421_413_8);
    p = p.mul_add(t, -0.284_496_74);
    p = p.mul_add(t, 0.254_829_6);
    (1.0 - p * t * exp(-x * x)).copysign(x)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The natural logarithm, to one unit in the last place (FreeBSD's `e_log.c`): x = 2^k (1 + f) with sqrt(2)/2
/// < 1 + f < sqrt(2), and ln(1 + f) = 2 s + s R(s^2) with s = f / (2 + f).
pub fn ln(x: f64) -> f64 {
    const LN2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
    const R: [f64; 7] = [
        f64::from_bits(0x3fe5_5555_5555_5593),
        f64::from_bits(0x3fd9_9999_9997_fa04),
        f64::from_bits(0x3fd2_4924_9422_9359),
        f64::from_bits(0x3fcc_71c5_1d8e_78af),
        f64::from_bits(0x3fc7_4664_96cb_03de),
        f64::from_bits(0x3fc3_9a09_d078_c69f),
        f64::from_bits(0x3fc2_f112_df3e_5244),
    ];
    if x.is_nan() || x == f64::INFINITY {
        return x;
    }
    if x <= 0.0 {
        return if x == 0.0 { f64::NEG_INFINITY } else { f64::NAN };
    }
    // A subnormal number is made a normal one first.
    let (x, shift) = if x < f64::MIN_POSITIVE { (x * 2f64.powi(54), -54) } else { (x, 0) };
    // Adding the distance from sqrt(2)/2 to 1 carries into the exponent where the mantissa is above sqrt(2).
    const ABOVE: u64 = 0x3ff0_0000_0000_0000 - 0x3fe6_a09e_0000_0000;
    let carried = x.to_bits() + ABOVE;
    let k = f64::from((carried >> 52) as i32 - 1023 + shift);
    let f = f64::from_bits((carried & 0x000f_ffff_ffff_ffff) + 0x3fe6_a09e_0000_0000) - 1.0;
    let s = f / (2.0 + f);
    let (z, half) = (s * s, 0.5 * f * f);
    let w = z * z;
    let even = w * (R[1] + w * (R[3] + w * R[5]));
    let odd = z * (R[0] + w * (R[2] + w * (R[4] + w * R[6])));
    s * (half + (even + odd)) + k * LN2_LOW - half + f + k * LN2_HIGH
}

/// x^n by squaring.
pub fn power(x: f64, n: u64) -> f64 {
    let (mut square, mut left, mut product) = (x, n, 1.0);
    while left > 0 {
        if left & 1 == 1 {
            product *= square;
        }
        square *= square;
        left >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_and_powers_are_accurate() {
        let numbers = (1..4000).flat_map(|i| {
            let x = f64::from(i) * 0.000_73;
            [x, 1.0 + x * 1e-6, x * 1e300, x * 1e-310, 1.0 / x]
        });
        for x in numbers {
            let (ours, exact) = (ln(x), x.ln());
            let ulp = f64::EPSILON * exact.abs().max(f64::MIN_POSITIVE);
            assert!((ours - exact).abs() <= ulp, "ln {x}: {ours} {exact}");
        }
        assert_eq!((ln(1.0), ln(0.0), ln(f64::INFINITY)), (0.0, f64::NEG_INFINITY, f64::INFINITY));
        assert!(ln(-1.0).is_nan() && ln(f64::NAN).is_nan());
        for (x, n) in [(0.999f64, 100_000), (0.9, 7), (0.95, 1), (0.5, 0), (0.999_9, 12_345)] {
            let exact = x.powf(n as f64);
            assert!((power(x, n) - exact).abs() <= 1e-11 * exact, "{x}^{n}");
        }
    }

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
