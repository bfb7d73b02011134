// Normalisation by the root mean square over the last dimension; the formulas are those of rms_norm.rs.
//
// x, y, dy, dx, residual: T [rows, c]; scale: [c], f32 where `wide`, else T; statistics: f32 [rows] = rstd.
//
// Row geometry (lanes.cuh):
//   rms_norm_forward(x, scale, wide, y, statistics, rows, c, eps)
//   rms_norm_backward_input(dy, x, scale, wide, statistics, dx, rows, c); dx may be dy
//   rms_norm_backward_remaking(dy, x, scale, wide, statistics, residual, dx, y, rows, c):
//     dx = residual, unless it is null, + the above, added in f32; y = what the forward pass made of x. dx may be
//     dy or residual.
// Column geometry:
//   rms_norm_backward_weights(dy, x, statistics, partial, rows, c, piece): partial: f32 [pieces, c] = dscale of
//     rows i piece ..; pieces = ceil(rows / piece); about 256 pieces are good.
//   rms_norm_backward_weights_total(partial, dscale, pieces, c, narrow): the sum over the pieces, as f32 or, where
//     narrow, bf16. grid ceil(c / 32), block (32, 8).

// Few registers, so that 48 warps of a multiprocessor have loads under way.
#define OCCUPIED extern "C" __global__ void __launch_bounds__(512, 3)

template <int N>
DEVICE void forward(const T* x, Weights scale, T* y, float* statistics, i64 rows, i64 c, float eps) {
    const i64 row = row_in_grid();
    if (row >= rows) return;
    x += row * c, y += row * c;

    Raw<T, N> held[HELD];
    float squares = 0.0f;
    for_row<N>(c, [&](i64 i, int k) {
        Raw<T, N> raw;
        float v[N];
        raw.read(x + i);
        raw.get(v);
        for (int j = 0; j < N; ++j) squares += v[j] * v[j];
        if (k < HELD) held[k] = raw;
    });
    const float rstd = 1.0f / sqrtf(row_sum(squares) / c + eps);
    for_row<N>(c, [&](i64 i, int k) {
        float v[N], a[N];
        if (k < HELD)
            held[k].get(v);
        else
            load(x + i, v);
        scale.get(i, a);
        for (int j = 0; j < N; ++j) v[j] = v[j] * rstd * a[j];
        store(y + i, v);
    });
    if (threadIdx.x == 0) statistics[row] = rstd;
}

// A row on the way back, as norm/backward_input.cuh wants it.
struct Row {
    enum : int { NUMBERS = 1 };
    float rstd;
    float mean_dh = 0.0f;

    DEVICE Row(const float* at) : rstd(*at) {}
    DEVICE float h(float x) const { return x * rstd; }
    DEVICE float y(float h, float scale, float) const { return h * scale; }
    DEVICE void add(float d, float h) { mean_dh += d * h; }
    DEVICE void finish(i64 c) { mean_dh = row_sum(mean_dh) / c; }
    // Spelt out, so that both kernels round alike.
    DEVICE float dx(float d, float h) const { return rstd * fmaf(-h, mean_dh, d); }
};

template <int N>
DEVICE void backward_weights(const T* __restrict__ dy, const T* __restrict__ x,
                             const float* __restrict__ statistics, float* __restrict__ partial, i64 rows, i64 c,
                             i64 piece) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    const i64 first = blockIdx.y * piece, end = first + piece < rows ? first + piece : rows;
    float dscale[N] = {};
    if (column < c) {
#pragma unroll 4
        for (i64 row = first + threadIdx.y; row < end; row += blockDim.y) {
            const float rstd = statistics[row];
            float d[N], v[N];
            load(dy + row * c + column, d);
            load(x + row * c + column, v);
            for (int j = 0; j < N; ++j) dscale[j] += d[j] * (v[j] * rstd);
        }
    }
    sum_over_y(dscale);
    if (threadIdx.y == 0 && column < c) store(partial + blockIdx.y * c + column, dscale);
}

OCCUPIED rms_norm_forward(const T* x, const void* scale, int wide, T* y, float* statistics, i64 rows, i64 c,
                              float eps) {
    let_next_begin();
    if (c % LANES == 0)
        forward<LANES>(x, {scale, wide}, y, statistics, rows, c, eps);
    else
        forward<1>(x, {scale, wide}, y, statistics, rows, c, eps);
}

KERNEL(512) rms_norm_backward_input(const T* dy, const T* x, const void* scale, int wide, const float* statistics,
                                     T* dx, i64 rows, i64 c) {
    if (c % LANES == 0)
        backward_input<Row, LANES, false>(dy, x, {scale, wide}, {}, statistics, nullptr, dx, nullptr, rows, c);
    else
        backward_input<Row, 1, false>(dy, x, {scale, wide}, {}, statistics, nullptr, dx, nullptr, rows, c);
}

KERNEL(512) rms_norm_backward_remaking(const T* dy, const T* x, const void* scale, int wide, const float* statistics,
                                        const T* residual, T* dx, T* y, i64 rows, i64 c) {
    if (c % LANES == 0)
        backward_input<Row, LANES, true>(dy, x, {scale, wide}, {}, statistics, residual, dx, y, rows, c);
    else
        backward_input<Row, 1, true>(dy, x, {scale, wide}, {}, statistics, residual, dx, y, rows, c);
}

KERNEL(256) rms_norm_backward_weights(const T* dy, const T* x, const float* statistics, float* partial, i64 rows,
                                      i64 c, i64 piece) {
    if (c % LANES == 0)
        backward_weights<LANES>(dy, x, statistics, partial, rows, c, piece);
    else
        backward_weights<1>(dy, x, statistics, partial, rows, c, piece);
}

KERNEL(256) rms_norm_backward_weights_total(const float* partial, void* dscale, i64 pieces, i64 c, int narrow) {
    const i64 column = static_cast<i64>(blockIdx.x) * 32 + threadIdx.x;
    const float sum = column_total(partial, pieces, c, column);
    if (threadIdx.y == 0 && column < c) put(dscale, column, sum, narrow);
}
