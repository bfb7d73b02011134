// Sums, products and multiples, element by element.
//
// elementwise_add_f32, elementwise_add_bf16(a, b, y, n): y = a + b; a, y: T [n], b: f32 or bf16 [n].
//   y may be a: that is add_into.
// elementwise_mul(a, b, y, n): y = a b; T [n].
// elementwise_scale(a, y, n, s): y = s a; T [n]. y may be a: that is scale_into.
//   All: grid ceil(n / 4096), block 256.

template <class B>
DEVICE void add(const T* __restrict__ a, const B* __restrict__ b, T* __restrict__ y, i64 n) {
    for_each<common_width<T, B>()>(n, aligned(a) && aligned(b) && aligned(y), [&](i64 i, auto width) {
        float v[width.value], w[width.value];
        load(a + i, v);
        load(b + i, w);
        for (int k = 0; k < width.value; ++k) v[k] += w[k];
        store(y + i, v);
    });
}

KERNEL(256) elementwise_add_f32(const T* a, const float* b, T* y, i64 n) { add(a, b, y, n); }
KERNEL(256) elementwise_add_bf16(const T* a, const bf16* b, T* y, i64 n) { add(a, b, y, n); }

KERNEL(256) elementwise_mul(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ y, i64 n) {
    for_each<LANES>(n, aligned(a) && aligned(b) && aligned(y), [&](i64 i, auto width) {
        float v[width.value], w[width.value];
        load(a + i, v);
        load(b + i, w);
        for (int k = 0; k < width.value; ++k) v[k] *= w[k];
        store(y + i, v);
    });
}

KERNEL(256) elementwise_scale(const T* __restrict__ a, T* __restrict__ y, i64 n, float s) {
    for_each<LANES>(n, aligned(a) && aligned(y), [&](i64 i, auto width) {
        float v[width.value];
        load(a + i, v);
        for (int k = 0; k < width.value; ++k) v[k] *= s;
        store(y + i, v);
    });
}
