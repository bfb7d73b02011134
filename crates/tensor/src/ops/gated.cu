// Gated units; the formulas are those of gated.rs.
//
// gated_forward(x, y, rows, n, kind): y = f(g) u
// gated_backward(x, dy, dx, y, rows, n, kind): dx = [dy u f'(g) | dy f(g)], and y = f(g) u unless y is null
//   x, dx: T [rows, 2 n] = [g | u]; y, dy: T [rows, n]; kind: 1 GELU (tanh), 2 SiLU.
//   N = LANES if n divides by it, else 1; tx = the smallest power of two that is not below n / N, at most 32.
//   grid ceil(rows / (256 / tx)), block (tx, 256 / tx).

template <class Kind, int N>
DEVICE void forward(const T* __restrict__ x, T* __restrict__ y, i64 rows, i64 n) {
    const i64 row = row_in_grid();
    if (row >= rows) return;
    x += row * 2 * n, y += row * n;
    for (i64 i = threadIdx.x * N; i < n; i += blockDim.x * N) {
        float g[N], u[N];
        load(x + i, g);
        load(x + n + i, u);
        for (int k = 0; k < N; ++k) g[k] = Kind::apply(g[k]) * u[k];
        store(y + i, g);
    }
}

template <class Kind, int N>
DEVICE void backward(const T* __restrict__ x, const T* __restrict__ dy, T* __restrict__ dx, T* __restrict__ y, i64 rows,
                     i64 n) {
    const i64 row = row_in_grid();
    if (row >= rows) return;
    x += row * 2 * n, dx += row * 2 * n, dy += row * n;
    if (y) y += row * n;
    for (i64 i = threadIdx.x * N; i < n; i += blockDim.x * N) {
        float g[N], u[N], d[N];
        load(x + i, g);
        load(x + n + i, u);
        load(dy + i, d);
        float value[N], dg[N];
        for (int k = 0; k < N; ++k) {
            value[k] = Kind::apply(g[k]);
            dg[k] = d[k] * u[k] * Kind::slope(g[k]);
            d[k] *= value[k];
            value[k] *= u[k];
        }
        store(dx + i, dg);
        store(dx + n + i, d);
        if (y) store(y + i, value);
    }
}

template <class Kind>
DEVICE void forward_of(const T* x, T* y, i64 rows, i64 n) {
    if (n % LANES == 0)
        forward<Kind, LANES>(x, y, rows, n);
    else
        forward<Kind, 1>(x, y, rows, n);
}

template <class Kind>
DEVICE void backward_of(const T* x, const T* dy, T* dx, T* y, i64 rows, i64 n) {
    if (n % LANES == 0)
        backward<Kind, LANES>(x, dy, dx, y, rows, n);
    else
        backward<Kind, 1>(x, dy, dx, y, rows, n);
}

KERNEL(256) gated_forward(const T* x, T* y, i64 rows, i64 n, int kind) {
    if (kind == 1) forward_of<Gelu>(x, y, rows, n);
    if (kind == 2) forward_of<Silu>(x, y, rows, n);
}

KERNEL(256) gated_backward(const T* x, const T* dy, T* dx, T* y, i64 rows, i64 n, int kind) {
    if (kind == 1) backward_of<Gelu>(x, dy, dx, y, rows, n);
    if (kind == 2) backward_of<Silu>(x, dy, dx, y, rows, n);
}
