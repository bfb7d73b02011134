// Between a dense tensor and its kept elements; T is moved as it is, and added as f32.
//
// compress_bits, compress_places(mask, dense, kept): kept = dense's kept elements.
// compress_bits_add_f32, compress_bits_add_bf16 and the same for places(mask, dense, kept): kept += dense's kept
//   elements; dense is of T, kept of the type in the name.
// expand_bits(mask, kept, dense): dense = kept in their places, zero elsewhere.
// expand_places(mask, kept, dense): the same, into a tensor that is zero.
//   Blocks of 256; bits: grid ceil(length / 4096); places: grid ceil(kept / 4096).

// Calls take(from, to) for each kept element: its place in the dense tensor, and among the kept.
template <class Take>
DEVICE void each_bit(const Mask& mask, Take take) {
    __shared__ u16 places[TILE];
    const Kept here = list_kept(mask, blockIdx.x, places);
    for (u32 k = threadIdx.x; k < here.count; k += THREADS) take(here.origin + places[k], here.first + k);
}

template <class Take>
DEVICE void each_place(const Mask& mask, Take take) {
    const Kept here = count_kept(mask, blockIdx.x);
    for (u32 k = threadIdx.x; k < here.count; k += THREADS) take(i64(mask.places[here.first + k]), here.first + k);
}

KERNEL(256) compress_bits(Mask mask, const T* __restrict__ dense, T* __restrict__ kept) {
    each_bit(mask, [&](i64 from, i64 to) { kept[to] = dense[from]; });
}

KERNEL(256) compress_places(Mask mask, const T* __restrict__ dense, T* __restrict__ kept) {
    each_place(mask, [&](i64 from, i64 to) { kept[to] = dense[from]; });
}

#define ADD(NAME, EACH, K)                                                                          \
    KERNEL(256) NAME(Mask mask, const T* __restrict__ dense, K* __restrict__ kept) {                \
        EACH(mask, [&](i64 from, i64 to) { kept[to] = from_f32<K>(to_f32(kept[to]) + to_f32(dense[from])); }); \
    }
ADD(compress_bits_add_f32, each_bit, float)
ADD(compress_bits_add_bf16, each_bit, bf16)
ADD(compress_places_add_f32, each_place, float)
ADD(compress_places_add_bf16, each_place, bf16)

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
