// Keys of scores, their histograms, and masks of those above a threshold. keys: u32 [n]; key 0 is no score's.
//
// select_keys(x, y, keys, n, magnitude): of x_i, or of x_i y_i where y is not null; |.| of it if `magnitude`. x: T, y: f32.
// select_random(keys, n, stream, table, runs): numbers of a random stream, none of them 0; table as run_index has it.
// select_histogram(keys, counts, n, low, high): counts u64 [65536] += the upper halves of the keys, or, if `low`, the lower halves of
//   those whose upper half is `high`. Whole numbers: their sum does not depend on the order in which atomics add.
//   grid ceil(n / 4096), block 256.
// select_equal(keys, counts, n, threshold, tile): how many of each tile equal the threshold; grid ceil(n / tile), block 256.
// select_at_least(keys, words, n, threshold, end): bit i is set where the key is above the threshold, or at it with i < end;
//   grid ceil(n / 256), block 256.

// As `key` in select.rs.
DEVICE u32 key_of(float score) {
    const u32 bits = __float_as_uint(score);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 1;
    if ((bits & 0x7fffffffu) == 0) return 0x80000000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

KERNEL(256) select_keys(const T* __restrict__ x, const float* __restrict__ y, u32* __restrict__ keys, i64 n, u32 magnitude) {
    for_each<1>(n, true, [&](i64 i, auto) {
        float v = to_f32(x[i]);
        if (y) v = __fmul_rn(v, y[i]);
        keys[i] = key_of(magnitude ? fabsf(v) : v);
    });
}

KERNEL(256) select_random(u32* __restrict__ keys, i64 n, u64 stream, const u64* __restrict__ table, i64 runs) {
    for_each<1>(n, true, [&](i64 i, auto) {
        const u32 bits = random_bits(stream, run_index(table, runs, i));
        keys[i] = bits ? bits : 1u;
    });
}

KERNEL(256) select_histogram(const u32* __restrict__ keys, u64* __restrict__ counts, i64 n, u32 low, u32 high) {
    for_each<1>(n, true, [&](i64 i, auto) {
        const u32 key = keys[i];
        if (!low) atomicAdd(counts + (key >> 16), u64(1));
        else if (key >> 16 == high) atomicAdd(counts + (key & 0xffffu), u64(1));
    });
}

KERNEL(256) select_equal(const u32* __restrict__ keys, u32* __restrict__ counts, i64 n, u32 threshold, u32 tile) {
    __shared__ u32 count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const i64 first = i64(blockIdx.x) * tile, end = first + tile < n ? first + tile : n;
    u32 own = 0;
    for (i64 i = first + threadIdx.x; i < end; i += THREADS) own += keys[i] == threshold;
    atomicAdd(&count, own);
    __syncthreads();
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

KERNEL(256) select_at_least(const u32* __restrict__ keys, u32* __restrict__ words, i64 n, u32 threshold, i64 end) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    const u32 key = i < n ? keys[i] : 0;
    const bool kept = i < n && (key > threshold || (key == threshold && i < end));
    const u32 word = __ballot_sync(0xffffffffu, kept);
    if (i < n && threadIdx.x % 32 == 0) words[i / 32] = word;
}
