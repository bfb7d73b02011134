// Activations, element by element; the formulas and what is saved are those of activation.rs.
//
// activation_forward(x, y, n, kind): y = f(x)
// activation_backward(saved, dy, dx, y, n, kind): dx = dy f'(x), and y = f(saved) unless y is null; dx may be dy
//   kind: 0 ReLU, 1 GELU (tanh), 2 SiLU, 3 GELU (erf), 4 tanh. Tensors are T [n].
//   grid ceil(n / 4096), block 256.

template <class Kind>
DEVICE void forward(const T* __restrict__ x, T* __restrict__ y, i64 n) {
    for_each<LANES>(n, aligned(x) && aligned(y), [&](i64 i, auto width) {
        float v[width.value];
        load(x + i, v);
        for (int k = 0; k < width.value; ++k) v[k] = Kind::apply(v[k]);
        store(y + i, v);
    });
}

template <class Kind>
DEVICE void backward(const T* __restrict__ saved, const T* __restrict__ dy, T* __restrict__ dx, T* __restrict__ y,
                     i64 n) {
    // A null y is aligned, too.
    for_each<LANES>(n, aligned(saved) && aligned(dy) && aligned(dx) && aligned(y), [&](i64 i, auto width) {
        float v[width.value], d[width.value];
        load(saved + i, v);
        load(dy + i, d);
        for (int k = 0; k < width.value; ++k) d[k] *= Kind::slope(v[k]);
        store(dx + i, d);
        if (y) {
            for (int k = 0; k < width.value; ++k) v[k] = Kind::apply(v[k]);
            store(y + i, v);
        }
    });
}

KERNEL(256) activation_forward(const T* x, T* y, i64 n, int kind) {
    if (kind == 0) forward<Relu>(x, y, n);
    if (kind == 1) forward<Gelu>(x, y, n);
    if (kind == 2) forward<Silu>(x, y, n);
    if (kind == 3) forward<GeluErf>(x, y, n);
    if (kind == 4) forward<Tanh>(x, y, n);
}

KERNEL(256) activation_backward(const T* saved, const T* dy, T* dx, T* y, i64 n, int kind) {
    if (kind == 0) backward<Relu>(saved, dy, dx, y, n);
    if (kind == 1) backward<Gelu>(saved, dy, dx, y, n);
    if (kind == 2) backward<Silu>(saved, dy, dx, y, n);
    if (kind == 3) backward<GeluErf>(saved, dy, dx, y, n);
    if (kind == 4) backward<Tanh>(saved, dy, dx, y, n);
}
