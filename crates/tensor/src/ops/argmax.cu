// argmax(x, y, n): y: u32 [1] = the index of the largest of x: T [n], the first of equal ones; what is no number is never it, and
//   where there is no number it is 0. grid 1, block 1024. May be launched early.

struct Best {
    float value;
    u32 index;

    DEVICE void meet(float other, u32 at) {
        if (other > value || (other == value && at < index)) value = other, index = at;
    }
    DEVICE void meet_warp() {
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(FULL_WARP, value, step);
            meet(other, __shfl_xor_sync(FULL_WARP, index, step));
        }
    }
};

KERNEL(1024) argmax(const T* x, u32* y, i64 n) {
    __shared__ Best by_warp[WARP];
    let_next_begin();
    wait_for_work_before();
    Best best{-INFINITY_F, 0xffffffffu};
    const i64 packs = n / LANES;
#pragma unroll 4
    for (i64 p = threadIdx.x; p < packs; p += blockDim.x) {
        float v[LANES];
        load(x + p * LANES, v);
        for (int i = 0; i < LANES; ++i) best.meet(v[i], static_cast<u32>(p * LANES + i));
    }
    for (i64 i = packs * LANES + threadIdx.x; i < n; i += blockDim.x) best.meet(to_f32(x[i]), static_cast<u32>(i));
    best.meet_warp();
    if (lane() == 0) by_warp[warp_in_block()] = best;
    __syncthreads();
    if (warp_in_block() > 0) return;
    best = by_warp[lane()];
    best.meet_warp();
    if (lane() == 0) *y = best.index < n ? best.index : 0;
}
