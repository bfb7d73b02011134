// From kept elements to a dense tensor; T is moved as it is.
//
// expand_bits(mask, kept, dense): dense = kept in their places, zero elsewhere.
// expand_places(mask, kept, dense): the same, into a tensor that is zero.
//   Blocks of 256; bits: grid ceil(length / 4096); places: grid ceil(kept / 4096).
// expand_fence(): nothing. Kernels that begin early read weights before they wait for the work before them; where this stands between, what
//   was expanded is complete by then.
//
// All that a model does with weights which rest compressed waits for this, so it runs at the memory's rate: a block's kept values come
// into shared memory one after the other, and a thread makes 16 bytes of the dense tensor at a time from the bits of one word, so that
// loads and stores coalesce whatever is kept.

KERNEL(256) expand_bits(Mask mask, const T* __restrict__ kept, T* __restrict__ dense) {
    constexpr int WORDS = TILE / 32;
    __shared__ u32 words[WORDS], before[WORDS];
    __shared__ T values[TILE];
    const RankedWord word = rank_word(mask, blockIdx.x);
    if (threadIdx.x < WORDS) words[threadIdx.x] = word.bits, before[threadIdx.x] = word.before;
    for (u32 k = threadIdx.x; k < word.here.count; k += THREADS) values[k] = kept[word.here.first + k];
    __syncthreads();
    for_each<LANES>(mask.length, aligned(dense), [&](i64 i, auto width) {
        const u32 at = static_cast<u32>(i - word.here.origin), bit = at % 32, bits = words[at / 32];
        u32 next = before[at / 32] + __popc(bits & ((1u << bit) - 1));
        if constexpr (width.value == 1) {
            dense[i] = bits >> bit & 1 ? values[next] : T{};
        } else {
            Pack<T> group;
#pragma unroll
            for (int k = 0; k < width.value; ++k) {
                const u32 is_kept = bits >> (bit + k) & 1;
                group.v[k] = is_kept ? values[next] : T{};
                next += is_kept;
            }
            store_16(dense + i, group);
        }
    });
}

KERNEL(32) expand_fence() {}

KERNEL(256) expand_places(Mask mask, const T* __restrict__ kept, T* __restrict__ dense) {
    const Kept here = count_kept(mask, blockIdx.x);
    for (u32 k = threadIdx.x; k < here.count; k += THREADS) dense[mask.places[here.first + k]] = kept[here.first + k];
}
