// A tensor in another float type: exact when it widens, to the nearest (ties to even) when it narrows.
//
// cast_to_f32, cast_to_bf16(x, y, n): x: T [n]; y: [n].
//   grid ceil(n / 4096), block 256.

template <class To>
DEVICE void convert(const T* __restrict__ x, To* __restrict__ y, i64 n) {
    for_each<common_width<T, To>()>(n, aligned(x) && aligned(y), [&](i64 i, auto width) {
        float v[width.value];
        load(x + i, v);
        store(y + i, v);
    });
}

KERNEL(256) cast_to_f32(const T* x, float* y, i64 n) { convert(x, y, n); }
KERNEL(256) cast_to_bf16(const T* x, bf16* y, i64 n) { convert(x, y, n); }
