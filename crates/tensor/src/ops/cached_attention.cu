// Attention of the last positions of a sequence over keys and values that are kept.
//
//   qkv:   T [t, heads + 2 kv_heads, d]       of positions first .. first + t
//   cache: T [2, kv_heads, context, d]        keys, then values
//   y:     T [t, heads, d]
//
// cached_attention_append(qkv, cache, n, first, context, heads, kv_heads, d): n = t 2 kv_heads d elements are copied.
//   grid ceil(n / 256), block 256.
// cached_attention_forward(qkv, cache, y, first, context, heads, kv_heads, d): a block has one position and one head of
//   queries, each of its 8 warps every eighth key with a running maximum and sum, which are joined at the end in the order
//   of the warps. d <= 256. grid t heads, block 256.

constexpr int WARPS = 8;
constexpr int MOST = 256;             // the largest head
constexpr int COLUMNS = MOST / WARP;  // of a head, per lane

KERNEL(256) cached_attention_append(const T* __restrict__ qkv, T* __restrict__ cache, i64 n, i64 first, i64 context,
                                    int heads, int kv_heads, int d) {
    const i64 i = thread_in_grid();
    if (i >= n) return;
    const i64 kept = 2 * static_cast<i64>(kv_heads) * d, row = i / kept, column = i % kept;
    const i64 head = column / d;
    cache[(head * context + first + row) * d + column % d] =
        qkv[row * (static_cast<i64>(heads) * d + kept) + static_cast<i64>(heads) * d + column];
}

KERNEL(256) cached_attention_forward(const T* __restrict__ qkv, const T* __restrict__ cache, T* __restrict__ y, i64 first,
                                     i64 context, int heads, int kv_heads, int d) {
    __shared__ float sums[WARPS][MOST], tops[WARPS], totals[WARPS];
    const int head = blockIdx.x % heads, shared = head / (heads / kv_heads), warp = warp_in_block();
    const i64 row = blockIdx.x / heads, count = first + row + 1;
    const T* query = qkv + row * (heads + 2 * kv_heads) * d + head * d;
    const T* keys = cache + shared * context * d;
    const T* values = cache + (kv_heads + shared) * context * d;
    const float scale = rsqrtf(static_cast<float>(d));

    float q[COLUMNS], out[COLUMNS] = {}, top = -INFINITY_F, total = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const int column = lane() + WARP * i;
        q[i] = column < d ? to_f32(query[column]) * scale : 0.0f;
    }
#pragma unroll 2
    for (i64 j = warp; j < count; j += WARPS) {
        float score = 0.0f, v[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int column = lane() + WARP * i;
            const bool there = column < d;
            score = fmaf(q[i], there ? to_f32(keys[j * d + column]) : 0.0f, score);
            v[i] = there ? to_f32(values[j * d + column]) : 0.0f;
        }
        score = warp_sum(score);
        const float larger = fmaxf(top, score), shrink = expf(top - larger), p = expf(score - larger);
        top = larger;
        total = fmaf(total, shrink, p);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) out[i] = fmaf(out[i], shrink, p * v[i]);
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) sums[warp][lane() + WARP * i] = out[i];
    if (lane() == 0) tops[warp] = top, totals[warp] = total;
    __syncthreads();
    const int column = threadIdx.x;
    if (column >= d) return;
    float all = -INFINITY_F, sum = 0.0f, weight = 0.0f;
    for (int w = 0; w < WARPS; ++w) all = fmaxf(all, tops[w]);
    for (int w = 0; w < WARPS; ++w) {
        // A warp that had no key counts for nothing: its maximum is minus infinity.
        const float factor = expf(tops[w] - all);
        sum = fmaf(sums[w][column], factor, sum);
        weight = fmaf(totals[w], factor, weight);
    }
    y[(row * heads + head) * d + column] = from_f32<T>(sum / weight);
}
