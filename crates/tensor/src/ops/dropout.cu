// Dropout: y_i = x_i scale where element number(i) of stream `key` is at least `threshold`, else 0. T [n].
//
// dropout_apply(x, y, n, threshold, scale, key, first, run, of): y may be x; number(i) = first + i / run * of + i % run; threshold = floor(rate 2^32), scale = 1 / (1 - rate).
//   grid ceil(n / 4096), block 256.

KERNEL(256) dropout_apply(const T* __restrict__ x, T* __restrict__ y, i64 n, u32 threshold, float scale, u64 key, u64 first,
                          u64 run, u64 of) {
    // A division of 64 bits costs more than all else.
    const bool plain = run >= static_cast<u64>(n);
    for_each<LANES>(n, aligned(x) && aligned(y), [&](i64 i, auto width) {
        float v[width.value];
        load(x + i, v);
        for (int k = 0; k < width.value; ++k) {
            const u64 at = i + k, number = first + (plain ? at : at / run * of + at % run);
            v[k] = random_bits(key, number) >= threshold ? v[k] * scale : 0.0f;
        }
        store(y + i, v);
    });
}
