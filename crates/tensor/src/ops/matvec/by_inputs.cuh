// A row times a matrix that is stored by inputs, by blocks that reach into each other's memory: compute capability 9.0 and newer.
//
// matvec_by_inputs(x, before, w, y, k, n, piece, after): w: T [k, n], and x goes through a norm first where `before` has one.
//   A block has ACROSS N columns and `piece` rows; blocks that are neighbours along y have the same columns and are a cluster: the
//   first of them adds their sums up. grid (ceil(n / (ACROSS N)), ceil(k / piece)), block 256. May be launched early: it asks for
//   weights before it waits for x.
// x: T [k], y: T [n]; N = LANES if the rows of w divide by it, else 1. Sums are f32, in an order that only sizes decide.

#if __CUDA_ARCH__ >= 900
constexpr int ACROSS = 8;               // threads beside each other over a row of weights: 128 bytes
constexpr int DOWN = THREADS / ACROSS;  // rows that a block reads at once
constexpr int PLACES = 8;               // packs of weights that a thread has under way
constexpr int STAGED = 1024;            // elements of x that a block holds: whole tiles of DOWN PLACES rows
constexpr int CLUSTER = 8;              // blocks that add their sums up, at most
constexpr int KEPT = 2;                 // packs of x that a thread keeps while it measures
constexpr int RESIDENT = 4;             // blocks of a processor, of this product and of the next
static_assert(STAGED % (DOWN * PLACES) == 0, "a tile begins at the ring's first place");

// What a block has in its memory.
struct Shared {
    alignas(16) T ring[PLACES * THREADS * LANES];
    float staged[STAGED];
    float by_warp[THREADS / WARP][ACROSS * LANES];
    float by_block[CLUSTER][ACROSS * LANES];  // in the first block of a cluster
};

// Packs of weights, `stride` elements apart, on their way to a thread's own ring in shared memory: they take no registers, and nobody
// waits for another thread's. A place is asked for again as soon as it is free.
template <int N>
struct Ring {
    T* own;  // its first place; the next is THREADS packs behind
    const T* next;
    i64 stride;
    int left;  // packs that have not been asked for

    DEVICE Ring(T* ring, const T* first, i64 step, int count)
        : own(ring + threadIdx.x * N), next(first), stride(step), left(count) {
#pragma unroll
        for (int u = 0; u < PLACES; ++u) ask(u);
    }
    DEVICE void ask(int u) {
        if constexpr (N > 1) {
            if (left > 0) copy_16(shared_address(own + u * THREADS * N), next, true);
            --left;
            next += stride;
            copies_close();
        }
    }
    // The next pack, from its place u; a single element is too little to be copied so.
    DEVICE void take(int u, float (&v)[N]) {
        if constexpr (N > 1) {
            copies_wait<PLACES - 1>();
            load(own + u * THREADS * N, v);
            ask(u);
        } else {
            load(next, v);
            next += stride;
        }
    }
};

// A row, or the norm of it, as a block sees it: each block reads all of x, which is small beside its weights.
struct Row {
    const T* x;
    const Before& norm;
    i64 k;
    bool packed;  // k and what a block has of it are whole packs
    float mean, rstd;
    Raw<T, LANES> scale, shift;  // of the first pack that this thread stages

    DEVICE Row(const T* row, const Before& before, i64 length, bool packs)
        : x(row), norm(before), k(length), packed(packs), mean(0.0f), rstd(1.0f) {}

    // Reads weights of the norm; may be called before x is there.
    DEVICE void prepare(i64 first, i64 end) {
        const i64 i = first + threadIdx.x * LANES;
        if (!norm.scale || !packed || i >= end) return;
        scale.read(norm.scale + i);
        if (norm.shift) shift.read(norm.shift + i);
    }

    DEVICE void measure() {
        if (!norm.scale) return;
        const float per_element = 1.0f / k;
        const i64 packs = k % LANES == 0 ? k / LANES : 0;
        Raw<T, LANES> held[KEPT];
#pragma unroll
        for (int u = 0; u < KEPT; ++u)
            if (threadIdx.x + u * THREADS < packs) held[u].read(x + (threadIdx.x + u * THREADS) * LANES);
        auto each = [&](auto body) {
#pragma unroll
            for (int u = 0; u < KEPT; ++u) {
                if (threadIdx.x + u * THREADS >= packs) continue;
                float v[LANES];
                held[u].get(v);
                for (int i = 0; i < LANES; ++i) body(v[i]);
            }
            for (i64 i = (packs ? KEPT * THREADS * LANES : 0) + threadIdx.x; i < k; i += THREADS) body(to_f32(x[i]));
        };
        if (norm.centred) {
            float sum = 0.0f;
            each([&](float v) { sum += v; });
            mean = block_sum(sum) * per_element;
        }
        // E[x^2] - mean^2 would cancel.
        float squares = 0.0f;
        each([&](float v) { squares += (v - mean) * (v - mean); });
        rstd = 1.0f / sqrtf(block_sum(squares) * per_element + norm.eps);
    }

    // As the norm by itself would leave it.
    DEVICE float normed(float v, float scale, float shift) const {
        return norm.scale ? rounded<T>((v - mean) * rstd * scale + shift) : v;
    }

    // Elements from `first` on, at most STAGED, to shared memory; `prepared` where they are those of `prepare`.
    DEVICE void stage(float* staged, i64 first, i64 end, bool prepared) {
        if (!packed) {
            for (i64 i = first + threadIdx.x; i < end; i += THREADS)
                staged[i - first] = normed(to_f32(x[i]), norm.scale ? to_f32(norm.scale[i]) : 1.0f,
                                           norm.shift ? to_f32(norm.shift[i]) : 0.0f);
            return;
        }
        static_assert(STAGED <= THREADS * LANES, "a pack for each thread");
        if (!prepared) prepare(first, end);
        const i64 i = first + threadIdx.x * LANES;
        if (i >= end) return;
        float v[LANES], a[LANES] = {}, b[LANES] = {};
        load(x + i, v);
        if (norm.scale) scale.get(a);
        if (norm.shift) shift.get(b);
        for (int u = 0; u < LANES; ++u) staged[threadIdx.x * LANES + u] = normed(v[u], a[u], b[u]);
    }
};

template <int N>
DEVICE void columns_times(Shared& shared, const T* x, const Before& before, const T* w, T* y, i64 k, i64 n, i64 piece,
                          const After& after) {
    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS, own = threadIdx.x;
    const i64 start = static_cast<i64>(blockIdx.x) * ACROSS * N, column = start + across * N;
    const i64 first = blockIdx.y * piece, end = first + piece < k ? first + piece : k;
    const int rows = static_cast<int>(end - first), own_rows = column < n ? (rows - down + DOWN - 1) / DOWN : 0;
    const bool finishes = blockIdx.y == 0 && own < ACROSS * N && start + own < n;
    Ring<N> weights(shared.ring, w + (first + down) * n + column, DOWN * n, own_rows);
    arrive_in_cluster();
    Row row(x, before, k, k % LANES == 0 && piece % LANES == 0);
    row.prepare(first, end);
    const float bias = finishes && after.bias ? to_f32(after.bias[start + own]) : 0.0f;
    let_next_begin();
    wait_for_work_before();
    const float plus = finishes && after.plus ? to_f32(after.plus[start + own]) : 0.0f;
    row.measure();
    float sum[N] = {};
    for (int tile = 0; tile < rows; tile += STAGED) {
        const int to = tile + STAGED < rows ? tile + STAGED : rows;
        if (tile > 0) __syncthreads();
        row.stage(shared.staged, first + tile, first + to, tile == 0);
        __syncthreads();
        const int count = own_rows - tile / DOWN < STAGED / DOWN ? own_rows - tile / DOWN : STAGED / DOWN;
        const float* factors = shared.staged + down;
        for (int r = 0; r < count; r += PLACES) {
#pragma unroll
            for (int u = 0; u < PLACES; ++u) {
                if (r + u >= count) break;
                float v[N];
                weights.take(u, v);
                const float factor = factors[(r + u) * DOWN];
                for (int i = 0; i < N; ++i) sum[i] = fmaf(factor, v[i], sum[i]);
            }
        }
    }
    // Over the rows of a warp, of the block, and of all blocks.
#pragma unroll
    for (int i = 0; i < N; ++i) {
        for (int step = ACROSS; step < WARP; step *= 2) sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], step);
        if (lane() < ACROSS) shared.by_warp[warp_in_block()][across * N + i] = sum[i];
    }
    __syncthreads();
    wait_for_cluster();  // the first block has begun: its memory is there
    if (own < ACROSS * N) {
        float all = 0.0f;
        for (int warp = 0; warp < THREADS / WARP; ++warp) all += shared.by_warp[warp][own];
        to_first_block(&shared.by_block[blockIdx.y][own], all);
    }
    arrive_in_cluster();
    if (blockIdx.y != 0) return;
    wait_for_cluster();
    if (!finishes) return;
    float all = 0.0f;
    for (u32 rank = 0; rank < gridDim.y; ++rank) all += shared.by_block[rank][own];
    y[start + own] = from_f32<T>(activated(all + bias, static_cast<int>(after.kind)) + plus);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    matvec_by_inputs(const T* x, Before before, const T* w, T* y, i64 k, i64 n, i64 piece, After after) {
    __shared__ Shared shared;
    if (n % LANES == 0)
        columns_times<LANES>(shared, x, before, w, y, k, n, piece, after);
    else
        columns_times<1>(shared, x, before, w, y, k, n, piece, after);
}
#endif
