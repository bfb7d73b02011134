// Batches of images that are kept as bytes: cropped, perhaps mirrored, standardised; and their labels.
//
// pixels: bytes [count, h, w, channels]; values: f32 [channels, 256]; crops: Crop [n]; x: T [n, height, width, channels];
// targets: u32 [n].
//
// standardise(pixels, values, crops, x, targets, sizes): grid (n, ceil(height width channels / 4096)), block 256.

enum : int { NUMBERS = 4096 };

struct Crop {
    u32 image;
    int top, left;
    u32 flip, label;
};

struct Sizes {
    int h, w, height, width, channels;
};

// Each thread takes N numbers of a row at a time.
template <int N>
DEVICE void crop_image(const unsigned char* __restrict__ image, const float* __restrict__ values, const Crop crop,
                       T* __restrict__ x, const Sizes z) {
    const int row = z.width * z.channels, len = z.height * row;
    const int first = blockIdx.y * NUMBERS, end = len - first < NUMBERS ? len : first + NUMBERS;
    for (int p = first + threadIdx.x * N; p < end; p += THREADS * N) {
        const int r = p / row, in_row = p - r * row, y = r + crop.top;
        const bool inside = y >= 0 && y < z.h;
        const unsigned char* const line = image + static_cast<i64>(inside ? y : 0) * z.w * z.channels;
        int s = in_row / z.channels, k = in_row - s * z.channels;
        float v[N];
        for (int i = 0; i < N; ++i) {
            const int at = crop.left + (crop.flip ? z.width - 1 - s : s);
            const u32 byte = inside && at >= 0 && at < z.w ? line[at * z.channels + k] : 0;
            v[i] = values[k * 256 + byte];
            if (++k == z.channels) k = 0, ++s;
        }
        store(x + p, v);
    }
}

KERNEL(256) standardise(const unsigned char* pixels, const float* values, const Crop* crops, T* x, u32* targets,
                        Sizes z) {
    const Crop crop = crops[blockIdx.x];
    if (blockIdx.y == 0 && threadIdx.x == 0) targets[blockIdx.x] = crop.label;
    const unsigned char* const image = pixels + static_cast<i64>(crop.image) * z.h * z.w * z.channels;
    T* const to = x + static_cast<i64>(blockIdx.x) * z.height * z.width * z.channels;
    if (z.width * z.channels % LANES == 0)
        crop_image<LANES>(image, values, crop, to, z);
    else
        crop_image<1>(image, values, crop, to, z);
}
