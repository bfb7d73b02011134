// One row times a matrix: every weight is read once, 16 bytes at a time, and nothing else takes time.
//
// matvec_by_outputs(x, w, y, k, n, after): w: T [n, k]. A warp has a row. grid ceil(n / 8), block (32, 8). May be launched early: it
//   reads weights before it waits for x.
// For w: T [k, n] matvec/by_inputs.cuh has a kernel, and for cards that cannot run that there are these two:
// matvec_pieces(x, w, partial, k, n, piece): partial: f32 [pieces, n], piece i has rows i piece ..
//   column geometry (lanes.cuh) with pieces of its own: see cuda.rs.
// matvec_total(partial, y, pieces, n, after): y = the pieces added up. grid ceil(n / 32), block (32, 8).
// x: T [k], y: T [n]; N = LANES if the rows of w divide by it, else 1. Sums are f32, in an order that only sizes decide.

constexpr int AHEAD = 8;  // packs of weights that a thread asks for at a time

// Packs of weights, `stride` elements apart, AHEAD of them at a time.
template <int N>
struct Stream {
    Raw<T, N> packs[AHEAD];
    const T* next;
    i64 stride;
    int left;  // packs that have not been asked for

    DEVICE Stream(const T* first, i64 step, i64 count) : next(first), stride(step), left(static_cast<int>(count)) { ask(); }
    DEVICE void ask() {
#pragma unroll
        for (int u = 0; u < AHEAD; ++u, next += stride)
            if (u < left) packs[u].read(next);
        left -= AHEAD;
    }
};

template <int N>
DEVICE float row_times(const T* x, const T* w, i64 k) {
    const i64 first = threadIdx.x * N, step = WARP * N;
    Stream<N> weights(w + first, step, (k - first + step - 1) / step);
    let_next_begin();
    wait_for_work_before();
    float sum = 0.0f;
    for (i64 p = first; p < k; p += AHEAD * step) {
        if (p != first) weights.ask();
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (p + u * step >= k) continue;
            float a[N], b[N];
            weights.packs[u].get(a);
            load(x + p + u * step, b);
            for (int i = 0; i < N; ++i) sum = fmaf(a[i], b[i], sum);
        }
    }
    return warp_sum(sum);
}

KERNEL(256) matvec_by_outputs(const T* x, const T* w, T* y, i64 k, i64 n, After after) {
    const i64 row = row_in_grid();
    if (row >= n) return;
    const float sum = k % LANES == 0 ? row_times<LANES>(x, w + row * k, k) : row_times<1>(x, w + row * k, k);
    if (threadIdx.x == 0) after.put(y, row, sum);
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

KERNEL(256) matvec_pieces(const T* x, const T* w, float* partial, i64 k, i64 n, i64 piece) {
    if (n % LANES == 0)
        rows_times<LANES>(x, w, partial, k, n, piece);
    else
        rows_times<1>(x, w, partial, k, n, piece);
}

KERNEL(256) matvec_total(const float* partial, T* y, i64 pieces, i64 n, After after) {
    const i64 column = static_cast<i64>(blockIdx.x) * 32 + threadIdx.x;
    const float sum = column_total(partial, pieces, n, column);
    if (threadIdx.y == 0 && column < n) after.put(y, column, sum);
}
