// Batches of images that are stored as bytes, and their labels.
//
// pixels: bytes [count, len]; labels: u32 [count]; values: f32 [channels, 256]; picks: u32 [n]; x: T [n, len]; targets: u32 [n].
//
// stored_batch(pixels, labels, values, picks, x, targets, len, channels): x[i, p] = values[p mod channels, pixels[picks[i], p]],
//   targets[i] = labels[picks[i]]. grid (n, ceil(len / 1024)), block 256.

enum : int { PIXELS = 1024 };

KERNEL(256) stored_batch(const unsigned char* pixels, const u32* labels, const float* values, const u32* picks, T* x,
                         u32* targets, i64 len, i64 channels) {
    const i64 i = blockIdx.x;
    const i64 pick = picks[i];
    if (blockIdx.y == 0 && threadIdx.x == 0) targets[i] = labels[pick];
    const i64 first = (i64)blockIdx.y * PIXELS, end = first + PIXELS < len ? first + PIXELS : len;
    for (i64 p = first + threadIdx.x; p < end; p += blockDim.x) {
        const float v[1] = {values[p % channels * 256 + pixels[pick * len + p]]};
        store(x + i * len + p, v);
    }
}
