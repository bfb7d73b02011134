// From a dense tensor to its kept elements; T is moved as it is, and added as f32.
//
// compress_bits, compress_places(mask, dense, kept): kept = dense's kept elements.
// compress_bits_add_f32, compress_bits_add_bf16 and the same for places(mask, dense, kept): kept += dense's kept
//   elements; dense is of T, kept of the type in the name.
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
