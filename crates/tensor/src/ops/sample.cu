// sample_constant(values, n, value): all the same.
// sample_normal(values, n, key, table, runs, scale, from, width): normal numbers, those of `width` of the uniform numbers above
//   `from`, times `scale`; bit for bit those of random.rs. table u64 [runs, 2]: of each run the position of its first value, and its index.
//   Compiled without fused multiply-adds.

// As `ln` in math.rs, of a normal number.
DEVICE double exact_ln(double x) {
    const u64 above = 0x3ff0000000000000ull - 0x3fe6a09e00000000ull;
    const u64 carried = static_cast<u64>(__double_as_longlong(x)) + above;
    const double k = static_cast<double>(static_cast<int>(carried >> 52) - 1023);
    const double f = __longlong_as_double((carried & 0x000fffffffffffffull) + 0x3fe6a09e00000000ull) - 1.0;
    const auto bits = [](u64 b) { return __longlong_as_double(static_cast<long long>(b)); };
    const double s = f / (2.0 + f);
    const double z = s * s, half = 0.5 * f * f, w = z * z;
    const double even = w * (bits(0x3fd999999997fa04ull) + w * (bits(0x3fcc71c51d8e78afull) + w * bits(0x3fc39a09d078c69full)));
    const double odd = z * (bits(0x3fe5555555555593ull) +
                            w * (bits(0x3fd2492494229359ull) + w * (bits(0x3fc7466496cb03deull) + w * bits(0x3fc2f112df3e5244ull))));
    return s * (half + (even + odd)) + k * bits(0x3dea39ef35793c76ull) - half + f + k * bits(0x3fe62e42fee00000ull);
}

// As `normal_quantile` in random.rs.
DEVICE double quantile_of_tail(double q) {
    const double above = ((((-7.784894002430293e-03 * q + -3.223964580411365e-01) * q + -2.400758277161838e+00) * q + -2.549732539343734e+00) * q +
                          4.374664141464968e+00) * q + 2.938163982698783e+00;
    const double below = ((7.784695709041462e-03 * q + 3.224671290700398e-01) * q + 2.445134137142996e+00) * q + 3.754408661907416e+00;
    return above / (below * q + 1.0);
}

DEVICE double normal_quantile(double p) {
    if (p < 0.02425) return quantile_of_tail(sqrt(-2.0 * exact_ln(p)));
    if (p > 1.0 - 0.02425) return -quantile_of_tail(sqrt(-2.0 * exact_ln(1.0 - p)));
    const double q = p - 0.5, r = q * q;
    const double above = ((((-3.969683028665376e+01 * r + 2.209460984245205e+02) * r + -2.759285104469687e+02) * r + 1.38357751867269e+02) * r +
                          -3.066479806614716e+01) * r + 2.506628277459239e+00;
    const double below = (((-5.447609879822406e+01 * r + 1.615858368580409e+02) * r + -1.556989798598866e+02) * r + 6.680131188771972e+01) * r +
                         -1.328068155288572e+01;
    return above * q / (below * r + 1.0);
}

KERNEL(256) sample_constant(T* __restrict__ values, i64 n, float value) {
    for_each<1>(n, true, [&](i64 i, auto) { values[i] = from_f32<T>(value); });
}

KERNEL(256) sample_normal(T* __restrict__ values, i64 n, u64 key, const u64* __restrict__ table, i64 runs, double scale, double from, double width) {
    for_each<1>(n, true, [&](i64 i, auto) {
        const double uniform = (static_cast<double>(random_bits(key, run_index(table, runs, i))) + 0.5) / 4294967296.0;
        values[i] = from_f32<T>(static_cast<float>(scale * normal_quantile(from + width * uniform)));
    });
}
