// Layer normalisation over the last dimension; the formulas are those of layer_norm.rs.
//
// x, y, dy, dx, residual: T [rows, c]; scale, shift: [c], f32 where `wide`, else T;
// statistics: f32 [rows, 2] = mean, rstd.
//
// Row geometry (lanes.cuh):
//   layer_norm_forward(x, scale, shift, wide, y, statistics, rows, c, eps)
//   layer_norm_backward_input(dy, x, scale, wide, statistics, dx, rows, c); dx may be dy
//   layer_norm_backward_remaking(dy, x, scale, shift, wide, statistics, residual, dx, y, rows, c):
//     dx = residual, unless it is null, + the above, added in f32; y = what the forward pass made of x. dx may be
//     dy or residual.
// Column geometry:
//   layer_norm_backward_weights(dy, x, statistics, partial, rows, c, piece): partial: f32 [pieces, 2, c] =
//     dscale, dshift of rows i piece ..; pieces = ceil(rows / piece); about 256 pieces are good.
//   layer_norm_backward_weights_total(partial, dscale, dshift, pieces, c, narrow): the sums over the pieces, as
//     f32 or, where narrow, bf16. grid ceil(2 c / 32), block (32, 8).

template <int N>
DEVICE void forward(const T* x, Weights scale, Weights shift, T* y, float* statistics, i64 rows, i64 c, float eps) {
    const i64 row = row_in_grid();
    if (row >= rows) return;
    x += row * c, y += row * c;

    Raw<T, N> held[HELD];
    float total = 0.0f;
    for_row<N>(c, [&](i64 i, int k) {
        Raw<T, N> raw;
        float v[N];
        raw.read(x + i);
        raw.get(v);
        for (int j = 0; j < N; ++j) total += v[j];
        if (k < HELD) held[k] = raw;
    });
    const float per_element = 1.0f / c;
    const float mean = row_sum(total) * per_element;

    const auto again = [&](i64 i, int k, float(&v)[N]) {
        if (k < HELD)
            held[k].get(v);
        else
            load(x + i, v);
    };
    // E[x^2] - mean^2 would cancel.
    float squares = 0.0f;
    for_row<N>(c, [&](i64 i, int k) {
        float v[N];
        again(i, k, v);
        for (int j = 0; j < N; ++j) squares += (v[j] - mean) * (v[j] - mean);
    });
    const float rstd = 1.0f / sqrtf(row_sum(squares) * per_element + eps);
    for_row<N>(c, [&](i64 i, int k) {
        float v[N], a[N], b[N];
        again(i, k, v);
        scale.get(i, a);
        shift.get(i, b);
        for (int j = 0; j < N; ++j) v[j] = (v[j] - mean) * rstd * a[j] + b[j];
        store(y + i, v);
    });
    if (threadIdx.x == 0) reinterpret_cast<float2*>(statistics)[row] = make_float2(mean, rstd);
}

// A row on the way back, as norm/backward_input.cuh wants it.
struct Row {
    enum : int { NUMBERS = 2 };
    float mean, rstd;
    float mean_d = 0.0f, mean_dh = 0.0f;

    DEVICE Row(const float* at) {
        const float2 known = *reinterpret_cast<const float2*>(at);
        mean = known.x, rstd = known.y;
    }
    DEVICE float h(float x) const { return (x - mean) * rstd; }
    DEVICE float y(float h, float scale, float shift) const { return h * scale + shift; }
    DEVICE void add(float d, float h) { mean_d += d, mean_dh += d * h; }
    DEVICE void finish(i64 c) {
        const float per_element = 1.0f / c;
        mean_d = row_sum(mean_d) * per_element, mean_dh = row_sum(mean_dh) * per_element;
    }
    DEVICE float dx(float d, float h) const { return rstd * (d - mean_d - h * mean_dh); }
};

template <int N>
DEVICE void backward_weights(const T* __restrict__ dy, const T* __restrict__ x,
                             const float* __restrict__ statistics, float* __restrict__ partial, i64 rows, i64 c,
                             i64 piece) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    const i64 first = blockIdx.y * piece, end = first + piece < rows ? first + piece : rows;
    float dscale[N] = {}, dshift[N] = {};
    if (column < c) {
#pragma unroll 4
        for (i64 row = first + threadIdx.y; row < end; row += blockDim.y) {
            const float2 known = reinterpret_cast<const float2*>(statistics)[row];
            float d[N], v[N];
            load(dy + row * c + column, d);
            load(x + row * c + column, v);
            for (int j = 0; j < N; ++j) {
                dscale[j] += d[j] * ((v[j] - known.x) * known.y);
                dshift[j] += d[j];
            }
        }
    }
    sum_over_y(dscale);
    sum_over_y(dshift);
    if (threadIdx.y == 0 && column < c) {
        store(partial + blockIdx.y * 2 * c + column, dscale);
        store(partial + (blockIdx.y * 2 + 1) * c + column, dshift);
    }
}

KERNEL(512) layer_norm_forward(const T* x, const void* scale, const void* shift, int wide, T* y,
                                float* statistics, i64 rows, i64 c, float eps) {
    let_next_begin();
    if (c % LANES == 0)
        forward<LANES>(x, {scale, wide}, {shift, wide}, y, statistics, rows, c, eps);
    else
        forward<1>(x, {scale, wide}, {shift, wide}, y, statistics, rows, c, eps);
}

KERNEL(512) layer_norm_backward_input(const T* dy, const T* x, const void* scale, int wide,
                                       const float* statistics, T* dx, i64 rows, i64 c) {
    if (c % LANES == 0)
        backward_input<Row, LANES, false>(dy, x, {scale, wide}, {}, statistics, nullptr, dx, nullptr, rows, c);
    else
        backward_input<Row, 1, false>(dy, x, {scale, wide}, {}, statistics, nullptr, dx, nullptr, rows, c);
}

KERNEL(512) layer_norm_backward_remaking(const T* dy, const T* x, const void* scale, const void* shift, int wide,
                                          const float* statistics, const T* residual, T* dx, T* y, i64 rows, i64 c) {
    if (c % LANES == 0)
        backward_input<Row, LANES, true>(dy, x, {scale, wide}, {shift, wide}, statistics, residual, dx, y, rows, c);
    else
        backward_input<Row, 1, true>(dy, x, {scale, wide}, {shift, wide}, statistics, residual, dx, y, rows, c);
}

KERNEL(256) layer_norm_backward_weights(const T* dy, const T* x, const float* statistics, float* partial, i64 rows,
                                        i64 c, i64 piece) {
    if (c % LANES == 0)
        backward_weights<LANES>(dy, x, statistics, partial, rows, c, piece);
    else
        backward_weights<1>(dy, x, statistics, partial, rows, c, piece);
}

KERNEL(256) layer_norm_backward_weights_total(const float* partial, void* dscale, void* dshift, i64 pieces, i64 c,
                                              int narrow) {
    const i64 column = static_cast<i64>(blockIdx.x) * 32 + threadIdx.x;
    const float sum = column_total(partial, pieces, 2 * c, column);
    if (threadIdx.y == 0 && column < c) put(dscale, column, sum, narrow);
    if (threadIdx.y == 0 && column >= c && column < 2 * c) put(dshift, column - c, sum, narrow);
}
