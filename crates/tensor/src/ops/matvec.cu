// One row times a matrix: every weight is read once, 16 bytes at a time, and nothing else takes time.
//
// matvec_by_outputs(x, w, bias, y, k, n): w: T [n, k]; y = w x + bias. A warp has a row. grid ceil(n / 8), block (32, 8).
// matvec_by_inputs(x, w, partial, k, n, piece): w: T [k, n]; partial: f32 [pieces, n], piece i has rows i piece ..
//   column geometry (lanes.cuh) with pieces of its own: see cuda.rs.
// matvec_total(partial, bias, y, pieces, n): y = the pieces added up, + bias. grid ceil(n / 32), block (32, 8).
// x: T [k], y: T [n], bias: T [n] or null. Sums are f32, in an order that only sizes decide.

template <int N>
DEVICE float row_times(const T* __restrict__ x, const T* __restrict__ w, i64 k) {
    float sum = 0.0f;
#pragma unroll 4
    for (i64 p = threadIdx.x * N; p < k; p += WARP * N) {
        float a[N], b[N];
        load(w + p, a);
        load(x + p, b);
        for (int i = 0; i < N; ++i) sum = fmaf(a[i], b[i], sum);
    }
    return warp_sum(sum);
}

KERNEL(256) matvec_by_outputs(const T* x, const T* w, const T* bias, T* y, i64 k, i64 n) {
    const i64 row = row_in_grid();
    if (row >= n) return;
    const float sum = k % LANES == 0 ? row_times<LANES>(x, w + row * k, k) : row_times<1>(x, w + row * k, k);
    if (threadIdx.x == 0) y[row] = from_f32<T>(sum + (bias ? to_f32(bias[row]) : 0.0f));
}

template <int N>
DEVICE void rows_times(const T* __restrict__ x, const T* __restrict__ w, float* __restrict__ partial, i64 k, i64 n,
                       i64 piece) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    const i64 first = blockIdx.y * piece, end = first + piece < k ? first + piece : k;
    float sum[N] = {};
    if (column < n) {
#pragma unroll 4
        for (i64 row = first + threadIdx.y; row < end; row += blockDim.y) {
            float v[N];
            load(w + row * n + column, v);
            const float factor = to_f32(x[row]);
            for (int i = 0; i < N; ++i) sum[i] = fmaf(factor, v[i], sum[i]);
        }
    }
    sum_over_y(sum);
    if (threadIdx.y == 0 && column < n) store(partial + blockIdx.y * n + column, sum);
}

KERNEL(256) matvec_by_inputs(const T* x, const T* w, float* partial, i64 k, i64 n, i64 piece) {
    if (n % LANES == 0)
        rows_times<LANES>(x, w, partial, k, n, piece);
    else
        rows_times<1>(x, w, partial, k, n, piece);
}

KERNEL(256) matvec_total(const float* partial, const T* bias, T* y, i64 pieces, i64 n) {
    const i64 column = static_cast<i64>(blockIdx.x) * 32 + threadIdx.x;
    const float sum = column_total(partial, pieces, n, column);
    if (threadIdx.y == 0 && column < n) y[column] = from_f32<T>(sum + (bias ? to_f32(bias[column]) : 0.0f));
}
