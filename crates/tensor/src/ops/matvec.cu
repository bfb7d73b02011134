// One row times a matrix: every weight is read once, 16 bytes at a time, and nothing else takes time.
//
// matvec_by_outputs(x, w, y, k, n, after): w: T [n, k]. A warp has a row. grid ceil(n / 8), block (32, 8).
// matvec_by_inputs(x, before, w, y, k, n, piece, after): w: T [k, n], and x goes through a norm first where `before` has one. A block has ACROSS N columns and `piece` rows; blocks that
//   are neighbours along y have the same columns and are a cluster: the first of them adds their sums up. grid (ceil(n / (ACROSS N)),
//   ceil(k / piece)), block 256. Only where blocks can read each other's memory; elsewhere the next two:
// matvec_pieces(x, w, partial, k, n, piece): partial: f32 [pieces, n], piece i has rows i piece ..
//   column geometry (lanes.cuh) with pieces of its own: see cuda.rs.
// matvec_total(partial, y, pieces, n, after): y = the pieces added up. grid ceil(n / 32), block (32, 8).
// x: T [k], y: T [n]; N = LANES if the rows of w divide by it, else 1. Sums are f32, in an order that only sizes decide.
// The first two may be launched early: they read weights before they wait for x.

constexpr int ACROSS = 8;              // threads beside each other over a row of weights: 128 bytes
constexpr int DOWN = THREADS / ACROSS; // rows that a block reads at once
constexpr int AHEAD = 8;               // packs of weights that a thread has under way
constexpr int STAGED = 2048;           // elements of x that a block holds: whole tiles of DOWN AHEAD rows

// A norm of x: of both moments, or of the second alone. Scale: T [k], or null for no norm; shift: T [k] or null.
struct Before {
    const T* scale;
    const T* shift;
    float eps;
    int centred;
};

// What becomes of a sum: y = f(sum + bias) + plus. Both of T [n] or null; f by its number in activation/formulas.cuh.
struct After {
    const T* bias;
    const T* plus;
    i64 kind;

    DEVICE void put(T* y, i64 at, float sum) const {
        if (bias) sum += to_f32(bias[at]);
        sum = activated(sum, static_cast<int>(kind));
        if (plus) sum += to_f32(plus[at]);
        y[at] = from_f32<T>(sum);
    }
};

// A thread asks for AHEAD packs of weights at a time, `stride` elements apart.
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

#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What the block of this rank in the cluster has where `own` is here.
DEVICE float of_block(const float* own, u32 rank) {
    const u32 here = static_cast<u32>(__cvta_generic_to_shared(own));
    u32 there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
}

// The norm of one row, as a block sees it: each of its blocks reads all of x, which is small beside its weights.
struct Normed {
    const T* x;
    Before norm;
    float mean, rstd;

    DEVICE Normed(const T* row, const Before& before) : x(row), norm(before), mean(0.0f), rstd(1.0f) {}

    // The block will want these elements of scale and shift.
    DEVICE void expect(i64 first, i64 end) const {
        if (!norm.scale) return;
        const i64 i = first + static_cast<i64>(threadIdx.x) * (128 / sizeof(T));
        if (i >= end) return;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(norm.scale + i));
        if (norm.shift) asm volatile("prefetch.global.L2 [%0];" ::"l"(norm.shift + i));
    }

    template <class Body>
    DEVICE void each(i64 k, Body body) const {
        const i64 packs = k % LANES == 0 ? k / LANES : 0;
        for (i64 p = threadIdx.x; p < packs; p += THREADS) {
            float v[LANES];
            load(x + p * LANES, v);
            for (int i = 0; i < LANES; ++i) body(v[i]);
        }
        for (i64 i = packs * LANES + threadIdx.x; i < k; i += THREADS) body(to_f32(x[i]));
    }

    DEVICE void measure(i64 k) {
        if (!norm.scale) return;
        const float per_element = 1.0f / k;
        float sum = 0.0f, squares = 0.0f;
        if (norm.centred) {
            each(k, [&](float v) { sum += v; });
            mean = block_sum(sum) * per_element;
        }
        // E[x^2] - mean^2 would cancel.
        each(k, [&](float v) { squares += (v - mean) * (v - mean); });
        rstd = 1.0f / sqrtf(block_sum(squares) * per_element + norm.eps);
    }

    // As the norm by itself would leave it.
    DEVICE float get(i64 i) const {
        const float v = to_f32(x[i]);
        if (!norm.scale) return v;
        return rounded<T>((v - mean) * rstd * to_f32(norm.scale[i]) + (norm.shift ? to_f32(norm.shift[i]) : 0.0f));
    }
};

template <int N>
DEVICE void columns_times(const T* x, const Before& before, const T* w, T* y, i64 k, i64 n, i64 piece,
                          const After& after) {
    __shared__ float staged[STAGED], by_warp[THREADS / WARP][ACROSS * N], total[ACROSS * N];
    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    const i64 start = static_cast<i64>(blockIdx.x) * ACROSS * N, column = start + across * N;
    const i64 first = blockIdx.y * piece, end = first + piece < k ? first + piece : k;
    const int rows = static_cast<int>(end - first), own_rows = column < n ? (rows - down + DOWN - 1) / DOWN : 0;
    Stream<N> weights(w + (first + down) * n + column, DOWN * n, own_rows);
    Normed row(x, before);
    row.expect(first, end);
    let_next_begin();
    wait_for_work_before();
    row.measure(k);
    float sum[N] = {};
    for (int tile = 0; tile < rows; tile += DOWN * AHEAD) {
        if (tile % STAGED == 0) {
            if (tile > 0) __syncthreads();
            const int to = tile + STAGED < rows ? tile + STAGED : rows;
            for (int i = tile + threadIdx.x; i < to; i += THREADS) staged[i - tile] = row.get(first + i);
            __syncthreads();
        }
        const float* factors = staged + tile % STAGED + down;
        const int count = own_rows - tile / DOWN;
        if (tile > 0) weights.ask();
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (u >= count) continue;
            float v[N];
            weights.packs[u].get(v);
            for (int i = 0; i < N; ++i) sum[i] = fmaf(factors[u * DOWN], v[i], sum[i]);
        }
    }
    // Over the rows of a warp, of the block, and of all blocks.
#pragma unroll
    for (int i = 0; i < N; ++i) {
        for (int step = ACROSS; step < WARP; step *= 2) sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], step);
        if (lane() < ACROSS) by_warp[warp_in_block()][across * N + i] = sum[i];
    }
    __syncthreads();
    const int own = threadIdx.x;
    if (own < ACROSS * N) {
        float all = 0.0f;
        for (int warp = 0; warp < THREADS / WARP; ++warp) all += by_warp[warp][own];
        total[own] = all;
    }
    wait_for_cluster();
    if (blockIdx.y == 0 && own < ACROSS * N && start + own < n) {
        float all = 0.0f;
        for (u32 rank = 0; rank < gridDim.y; ++rank) all += of_block(total + own, rank);
        after.put(y, start + own, all);
    }
    // The others' memory is there until it has been read.
    wait_for_cluster();
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) matvec_by_inputs(const T* x, Before before, const T* w, T* y, i64 k, i64 n, i64 piece, After after) {
    if (n % LANES == 0)
        columns_times<LANES>(x, before, w, y, k, n, piece, after);
    else
        columns_times<1>(x, before, w, y, k, n, piece, after);
}
#endif

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
