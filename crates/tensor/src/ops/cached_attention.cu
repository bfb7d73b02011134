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
//   and one head of queries; `lanes` of its threads (a power of two up to 32, as many as the head has packs, or columns where
//   it has no whole packs) have every (256 / lanes)-th key, with a running maximum and sum, and all are joined in their order at
//   the end. Keys and values of the new positions are read where they come from. d <= 256. grid t heads, block 256. May be launched early.

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

// N columns at a time, up to V times for each thread.
template <int N, int V>
DEVICE void attend(const T* qkv, T* cache, T* y, i64 first, i64 context, int heads, int kv_heads, int d, int lanes) {
    // As many groups as there are times `lanes` in the block: their sums of d columns fill this at most.
    __shared__ float sums[THREADS * N * V], tops[THREADS], totals[THREADS];
    const int groups = THREADS / lanes, group = threadIdx.x / lanes, place = threadIdx.x % lanes;
    const int head = blockIdx.x % heads, shared = head / (heads / kv_heads);
    const i64 row = blockIdx.x / heads, count = first + row + 1;
    const i64 width = static_cast<i64>(heads + 2 * kv_heads) * d;
    const T* query = qkv + row * width + static_cast<i64>(head) * d;
    const T* new_keys = qkv + static_cast<i64>(heads + shared) * d;
    const T* new_values = new_keys + static_cast<i64>(kv_heads) * d;
    T* keys = cache + shared * context * d;
    T* values = cache + (kv_heads + shared) * context * d;
    const float scale = rsqrtf(static_cast<float>(d));

    float q[V][N], out[V][N] = {}, top = -INFINITY_F, total = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        const int column = (v * lanes + place) * N;
        if (column < d) load(query + column, q[v]);
        for (int i = 0; i < N; ++i) q[v][i] = column < d ? q[v][i] * scale : 0.0f;
    }
    // Of the heads that share keys and values, the first keeps those of its position.
    if (head % (heads / kv_heads) == 0) {
        for (int column = threadIdx.x; column < d; column += THREADS) {
            keys[(first + row) * d + column] = new_keys[row * width + column];
            values[(first + row) * d + column] = new_values[row * width + column];
        }
    }
#pragma unroll 4
    for (i64 from = 0; from < count; from += groups) {
        const i64 j = from + group;
        const bool there = j < count;
        const T* key = j < first ? keys + j * d : new_keys + (j - first) * width;
        const T* value = j < first ? values + j * d : new_values + (j - first) * width;
        float score = 0.0f, kept[V][N];
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const int column = (v * lanes + place) * N;
            if (!there || column >= d) continue;
            float k[N];
            load(key + column, k);
            load(value + column, kept[v]);
            for (int i = 0; i < N; ++i) score = fmaf(q[v][i], k[i], score);
        }
        for (int step = lanes / 2; step > 0; step /= 2) score += __shfl_xor_sync(FULL_WARP, score, step);
        if (!there) continue;
        const float larger = fmaxf(top, score), shrink = expf(top - larger), p = expf(score - larger);
        top = larger;
        total = fmaf(total, shrink, p);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if ((v * lanes + place) * N >= d) continue;
            for (int i = 0; i < N; ++i) out[v][i] = fmaf(out[v][i], shrink, p * kept[v][i]);
        }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
        const int column = (v * lanes + place) * N;
        if (column >= d) continue;
        for (int i = 0; i < N; ++i) sums[group * d + column + i] = out[v][i];
    }
    if (place == 0) tops[group] = top, totals[group] = total;
    __syncthreads();
    const int column = threadIdx.x;
    if (column >= d) return;
    float all = -INFINITY_F, sum = 0.0f, weight = 0.0f;
    for (int g = 0; g < groups; ++g) all = fmaxf(all, tops[g]);
    for (int g = 0; g < groups; ++g) {
        // A group that had no key counts for nothing: its maximum is minus infinity.
        const float factor = expf(tops[g] - all);
        sum = fmaf(sums[g * d + column], factor, sum);
        weight = fmaf(totals[g], factor, weight);
    }
    y[(row * heads + head) * d + column] = from_f32<T>(sum / weight);
}

KERNEL(256) cached_attention_forward(const T* qkv, T* cache, T* y, const u32* first, i64 context, int heads, int kv_heads,
                                     int d, int lanes) {
    let_next_begin();
    wait_for_work_before();
    if (d % LANES != 0)
        attend<1, MOST / WARP>(qkv, cache, y, *first, context, heads, kv_heads, d, lanes);
    else if (d <= lanes * LANES)
        attend<LANES, 1>(qkv, cache, y, *first, context, heads, kv_heads, d, lanes);
    else
        attend<LANES, 2>(qkv, cache, y, *first, context, heads, kv_heads, d, lanes);
}
