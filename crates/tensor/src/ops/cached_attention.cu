// Attention of the last positions of a sequence over keys and values that are kept.
//
//   qkv:   T [t, heads + 2 kv_heads, d]       of positions first .. first + t
//   cache: T [2, kv_heads, context, d]        keys, then values
//   y:     T [t, heads, d]
//   first: u32 [1], so that the same launch serves the next position
//
// cached_attention_append(qkv, cache, n, first, context, heads, kv_heads, d): n = t 2 kv_heads d elements are copied.
//   grid ceil(n / 256), block 256.
// cached_attention_forward(qkv, cache, y, first, context, heads, kv_heads, d, lanes): the same copy, and y. A block has one position
//   and one head of queries, or a cluster of blocks along y has them: the first of these joins what all have found. `lanes` of a block's
//   threads (a power of two up to 32, as many as the head has packs, or columns where it has no whole packs) have a key at a
//   time, with a running maximum and sum, joined in their order at the end. Keys and values of the new positions are read
//   where they come from. d <= 256. grid (t heads, blocks of a cluster: at most 8), block 256.
//   May be launched early. Before it waits it reads `first` and what the cache has before that: the host copies `first` to the card when
//   those keys and values are there (position.rs), and no kernel begins before such a copy is done.

constexpr int MOST = 256;  // the largest head

KERNEL(256) cached_attention_append(const T* __restrict__ qkv, T* __restrict__ cache, i64 n, const u32* first, i64 context,
                                    int heads, int kv_heads, int d) {
    const i64 i = thread_in_grid();
    if (i >= n) return;
    const i64 kept = 2 * static_cast<i64>(kv_heads) * d, row = i / kept, column = i % kept;
    const i64 head = column / d;
    cache[(head * context + *first + row) * d + column % d] =
        qkv[row * (static_cast<i64>(heads) * d + kept) + static_cast<i64>(heads) * d + column];
}

// Sums over the values of some keys, relative to the largest of their scores: N columns at a time, up to V times for each thread.
template <int N, int V>
struct Softmax {
    float top, total, out[V][N];

    DEVICE Softmax() : top(-INFINITY_F), total(0.0f), out{} {}

    // What sums relative to `top` become relative to a larger one; where there was no key, nothing.
    DEVICE static float shrink(float top, float larger) { return top == -INFINITY_F ? 0.0f : expf(top - larger); }

    DEVICE void raise(float larger) {
        const float factor = shrink(top, larger);
        top = larger;
        total *= factor;
#pragma unroll
        for (int v = 0; v < V; ++v)
            for (int i = 0; i < N; ++i) out[v][i] *= factor;
    }

    // With what the lane `step` away has.
    DEVICE void join(int step) {
        raise(fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step)));
        total += __shfl_xor_sync(FULL_WARP, total, step);
#pragma unroll
        for (int v = 0; v < V; ++v)
            for (int i = 0; i < N; ++i) out[v][i] += __shfl_xor_sync(FULL_WARP, out[v][i], step);
    }
};

// Sums over all columns of a head by several parties, each relative to its own maximum.
struct Parties {
    float sums[8][MOST], tops[8], totals[8];

    DEVICE float top(int count) const {
        float top = -INFINITY_F;
        for (int p = 0; p < count; ++p) top = fmaxf(top, tops[p]);
        return top;
    }
    // One column, and the total, of all relative to `top`.
    DEVICE float sum(int count, int column, float top, float& total) const {
        float sum = 0.0f;
        total = 0.0f;
        for (int p = 0; p < count; ++p) {
            const float factor = Softmax<1, 1>::shrink(tops[p], top);
            sum = fmaf(sums[p][column], factor, sum);
            total = fmaf(totals[p], factor, total);
        }
        return sum;
    }
};

// BATCH keys and values are under way at a time.
template <int N, int V, int BATCH>
DEVICE void attend(Parties& warps, Parties& blocks, const T* qkv, T* cache, T* y, i64 first, i64 context, int heads,
                   int kv_heads, int d, int lanes) {
    const int place = threadIdx.x % lanes, groups = THREADS / lanes * gridDim.y;
    const int head = blockIdx.x % heads, shared = head / (heads / kv_heads);
    const i64 row = blockIdx.x / heads, count = first + row + 1;
    const i64 width = static_cast<i64>(heads + 2 * kv_heads) * d;
    const T* query = qkv + row * width + static_cast<i64>(head) * d;
    const T* new_keys = qkv + static_cast<i64>(heads + shared) * d;
    const T* new_values = new_keys + static_cast<i64>(kv_heads) * d;
    T* keys = cache + shared * context * d;
    T* values = cache + (kv_heads + shared) * context * d;

    Raw<T, N> key[BATCH][V], value[BATCH][V];
    auto for_columns = [&](auto body) {
#pragma unroll
        for (int v = 0; v < V; ++v)
            if ((v * lanes + place) * N < d) body(v, (v * lanes + place) * N);
    };
    // Positions j, j + groups, ..: those that are in the cache, or those that are new.
    auto read = [&](i64 j, bool are_new) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b, j += groups) {
            if (j >= count || (j >= first) != are_new) continue;
            const T* from_key = are_new ? new_keys + (j - first) * width : keys + j * d;
            const T* from_value = are_new ? new_values + (j - first) * width : values + j * d;
            for_columns([&](int v, int column) {
                key[b][v].read(from_key + column);
                value[b][v].read(from_value + column);
            });
        }
    };
    i64 j = threadIdx.x / lanes * gridDim.y + blockIdx.y;
    read(j, false);
    wait_for_work_before();
    const float scale = rsqrtf(static_cast<float>(d));
    float q[V][N] = {};
    for_columns([&](int v, int column) {
        load(query + column, q[v]);
        for (int i = 0; i < N; ++i) q[v][i] *= scale;
    });
    // Of the heads that share keys and values, the first keeps those of its position.
    if (head % (heads / kv_heads) == 0 && blockIdx.y == 0) {
        for (int column = threadIdx.x; column < d; column += THREADS) {
            keys[(first + row) * d + column] = new_keys[row * width + column];
            values[(first + row) * d + column] = new_values[row * width + column];
        }
    }
    Softmax<N, V> sums;
    const i64 rounds = (count + groups * BATCH - 1) / (groups * BATCH);
    for (i64 round = 0; round < rounds; ++round, j += groups * BATCH) {
        if (round > 0) read(j, false);
        read(j, true);
        float score[BATCH], larger = sums.top;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            score[b] = 0.0f;
            for_columns([&](int v, int) {
                float k[N];
                key[b][v].get(k);
                for (int i = 0; i < N; ++i) score[b] = fmaf(q[v][i], k[i], score[b]);
            });
            for (int step = lanes / 2; step > 0; step /= 2) score[b] += __shfl_xor_sync(FULL_WARP, score[b], step);
            if (j + b * groups < count) larger = fmaxf(larger, score[b]);
        }
        sums.raise(larger);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (j + b * groups >= count) continue;
            const float p = expf(score[b] - larger);
            sums.total += p;
            for_columns([&](int v, int) {
                float x[N];
                value[b][v].get(x);
                for (int i = 0; i < N; ++i) sums.out[v][i] = fmaf(p, x[i], sums.out[v][i]);
            });
        }
    }
    // Over the keys of a warp, of the block, and of all blocks.
    for (int step = lanes; step < WARP; step *= 2) sums.join(step);
    const int warp = warp_in_block();
    if (lane() < lanes) for_columns([&](int v, int column) {
        for (int i = 0; i < N; ++i) warps.sums[warp][column + i] = sums.out[v][i];
    });
    if (lane() == 0) warps.tops[warp] = sums.top, warps.totals[warp] = sums.total;
    __syncthreads();
    const int column = threadIdx.x;
    float top = warps.top(THREADS / WARP), total, sum = 0.0f;
    if (column < d) sum = warps.sum(THREADS / WARP, column, top, total);
#if __CUDA_ARCH__ >= 900
    if (gridDim.y > 1) {
        wait_for_cluster();  // the first block has begun: its memory is there
        if (column < d) to_first_block(&blocks.sums[blockIdx.y][column], sum);
        if (column == 0) to_first_block(&blocks.tops[blockIdx.y], top), to_first_block(&blocks.totals[blockIdx.y], total);
        arrive_in_cluster();
        if (blockIdx.y > 0) return;
        wait_for_cluster();
        top = blocks.top(gridDim.y);
        if (column < d) sum = blocks.sum(gridDim.y, column, top, total);
    }
#endif
    if (column < d) y[(row * heads + head) * d + column] = from_f32<T>(sum / total);
}

KERNEL(256) cached_attention_forward(const T* qkv, T* cache, T* y, const u32* first, i64 context, int heads, int kv_heads,
                                     int d, int lanes) {
    __shared__ Parties warps, blocks;
#if __CUDA_ARCH__ >= 900
    if (gridDim.y > 1) arrive_in_cluster();
#endif
    let_next_begin();
    if (d % LANES != 0)
        attend<1, MOST / WARP, 1>(warps, blocks, qkv, cache, y, *first, context, heads, kv_heads, d, lanes);
    else if (d <= lanes * LANES)
        attend<LANES, 1, 4>(warps, blocks, qkv, cache, y, *first, context, heads, kv_heads, d, lanes);
    else
        attend<LANES, 2, 2>(warps, blocks, qkv, cache, y, *first, context, heads, kv_heads, d, lanes);
}
