// Between a dense tensor and its kept elements; T is moved as it is, and added as f32.
//
// compress_bits, compress_places(mask, dense, kept, sum): kept = dense's kept elements, or += where `sum`.
// expand_bits(mask, kept, dense): dense = kept in their places, zero elsewhere.
// expand_places(mask, kept, dense): the same, into a tensor that is zero.
//   Blocks of 256; bits: grid ceil(length / 4096); places: grid ceil(kept / 4096).




DEVICE void take(const T* dense, T* kept, i64 from, i64 to, int sum) {
    const T x = dense[from];
    kept[to] = sum ? from_f32<T>(to_f32(kept[to]) + to_f32(x)) : x;
}

KERNEL(256) compress_bits(Mask mask, const T* __restrict__ dense, T* __restrict__ kept, int sum) {
    __shared__ u16 places[TILE];
    const Kept here = list_kept(mask, blockIdx.x, places);
    for (u32 k = threadIdx.x; k < here.count; k += THREADS)
        take(dense, kept, here.origin + places[k], here.first + k, sum);
}

KERNEL(256) compress_places(Mask mask, const T* __restrict__ dense, T* __restrict__ kept, int sum) {
    const Kept here = count_kept(mask, blockIdx.x);
    for (u32 k = threadIdx.x; k < here.count; k += THREADS)
        take(dense, kept, mask.places[here.first + k], here.first + k, sum);
}

KERNEL(256) expand_bits(Mask mask, const T* __restrict__ kept, T* __restrict__ dense) {
    __shared__ u16 places[TILE];
    __shared__ alignas(16) T tile[TILE];
    const Kept here = list_kept(mask, blockIdx.x, places);
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) tile[i] = T{};
    __syncthreads();
    for (u32 k = threadIdx.x; k < here.count; k += THREADS) tile[places[k]] = kept[here.first + k];
    __syncthreads();
    for_each<LANES>(mask.length, aligned(dense), [&](i64 i, auto width) {
        Raw<T, width.value> group;
        group.read(tile + (i - here.origin));
        group.write(dense + i);
    });
}

KERNEL(256) expand_places(Mask mask, const T* __restrict__ kept, T* __restrict__ dense) {
    const Kept here = count_kept(mask, blockIdx.x);
    for (u32 k = threadIdx.x; k < here.count; k += THREADS) dense[mask.places[here.first + k]] = kept[here.first + k];
}
