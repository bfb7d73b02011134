// Dropout: y_i = x_i scale where element first + i of stream `key` is at least `threshold`, else 0. T [n].
//
// dropout_apply(x, y, n, threshold, scale, key, first): y may be x; threshold = floor(rate 2^32), scale = 1 / (1 - rate).
//   grid ceil(n / 4096), block 256.

KERNEL(256) dropout_apply(const T* __restrict__ x, T* __restrict__ y, i64 n, u32 threshold, float scale, u64 key, u64 first) {
    for_each<LANES>(n, aligned(x) && aligned(y), [&](i64 i, auto width) {
        float v[width.value];
        load(x + i, v);
        for (int k = 0; k < width.value; ++k) {
            v[k] = random_bits(key, first + i + k) >= threshold ? v[k] * scale : 0.0f;
        }
        store(y + i, v);
    });
}
