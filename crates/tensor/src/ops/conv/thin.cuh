// Convolution of thin images: of so few channels that a tile of a product would mostly be padding. A window has at most 64 elements.
// Windows and weights lie in shared memory, and a thread has 4 x 4 sums. T is f32 or bf16, sums are f32.
//
// conv_thin_forward(x, w, bias, y, shape): a block has 4096 / o pixels of y and all o channels. grid ceil(pixels / (4096 / o)), block 256,
//   dynamic shared bytes 4 window (4096 / o + o). o is a power of two from 4 to 256.
// conv_thin_weight(x, dy, partial, shape, share): as conv_backward_weight, share a multiple of 64. As many groups of threads as the block
//   has room for take their pixels in turn, and their sums are added in the groups' order. grid splits, block 256, dynamic shared bytes
//   the larger of 256 (window4 + o) and 16384, where window4 is the window rounded up to a multiple of 4; window4 o / 16 <= 256.

constexpr int WINDOW = 64;  // the most elements under a window

// Where the elements of a window stand, in the order (u, v, channel); found once for a block.
struct Taps {
    Tap at[WINDOW];

    DEVICE void find(const Shape& s, int window) {
        if (threadIdx.x < window) at[threadIdx.x] = tap(threadIdx.x, s.c, s.kernel);
        __syncthreads();
    }
    // Calls put(t, element) for every `step`-th element of a pixel's window from `first` on, and zeros up to `end`; eight are under way
    // at a time.
    template <class Put>
    DEVICE void gather(const Forward<T>& patches, const Pixel& pixel, int first, int step, int window, int end, Put put) const {
        constexpr int BATCH = 8;
        for (int from = first; from < end; from += BATCH * step) {
            float v[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                const int t = from + u * step;
                const T* const found = t < window ? patches.find(pixel, at[t]) : nullptr;
                v[u] = found ? to_f32(*found) : 0.0f;
            }
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                if (from + u * step < end) put(from + u * step, v[u]);
        }
    }
};

DEVICE void add_products(float (&sum)[4][4], const float4& a, const float4& b) {
    const float left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(left[i], right[j], sum[i][j]);
}

DEVICE const float4& four(const float* at) { return *reinterpret_cast<const float4*>(at); }

KERNEL(256) conv_thin_forward(const T* x, const T* w, const T* bias, T* y, Shape s) {
    extern __shared__ float4 room[];
    __shared__ Taps taps;
    const int window = s.kernel * s.kernel * s.c, pixels = 4096 / s.o;
    float* const windows = reinterpret_cast<float*>(room);  // [window, pixels]
    float* const weights = windows + window * pixels;       // [window, o]
    const Forward<T> patches{x, s};
    const int first = blockIdx.x * pixels;
    taps.find(s, window);
    for (int i = threadIdx.x; i < window * s.o; i += THREADS) weights[i] = to_f32(w[i % s.o * window + i / s.o]);
    // Threads that are neighbours have pixels that are neighbours.
    const int each = pixels < THREADS ? pixels : THREADS;
    for (int p = threadIdx.x % each; p < pixels; p += each) {
        const Pixel pixel = patches.pixel(first + p);
        taps.gather(patches, pixel, threadIdx.x / each, THREADS / each, window, window,
                    [&](int t, float v) { windows[t * pixels + p] = v; });
    }
    __syncthreads();
    const int across = s.o / 4, o = threadIdx.x % across * 4, p = threadIdx.x / across * 4;
    float sum[4][4] = {};
#pragma unroll 5
    for (int t = 0; t < window; ++t) add_products(sum, four(windows + t * pixels + p), four(weights + t * s.o + o));
    float b[4] = {};
    if (bias) load(bias + o, b);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (first + p + i >= patches.rows()) break;
        for (int j = 0; j < 4; ++j) sum[i][j] += b[j];
        store(y + static_cast<i64>(first + p + i) * s.o + o, sum[i]);
    }
}

constexpr int AT_A_TIME = 64;  // pixels whose windows are in shared memory

KERNEL(256) conv_thin_weight(const T* x, const T* dy, float* partial, Shape s, int share) {
    extern __shared__ float4 room[];
    __shared__ Taps taps;
    const int window = s.kernel * s.kernel * s.c, window4 = (window + 3) / 4 * 4;
    float* const windows = reinterpret_cast<float*>(room);    // [AT_A_TIME, window4]
    float* const gradients = windows + AT_A_TIME * window4;  // [AT_A_TIME, o]
    const Forward<T> patches{x, s};
    const int pixels = patches.rows(), first = blockIdx.x * share, end = first + share < pixels ? first + share : pixels;
    // Who has which sums: `tiles` threads of a group, which is whole warps.
    const int down = window4 / 4, tiles = down * (s.o / 4), group_size = (tiles + WARP - 1) / WARP * WARP;
    const int groups = THREADS / group_size, group = threadIdx.x / group_size, tile = threadIdx.x % group_size;
    const int t = tile % down * 4, o = tile / down * 4;
    const bool works = group < groups && tile < tiles;
    float sum[4][4] = {};
    taps.find(s, window);
    for (int at = first; at < end; at += AT_A_TIME) {
        if (at > first) __syncthreads();
        const int p = threadIdx.x % AT_A_TIME;
        const Pixel pixel = at + p < end ? patches.pixel(at + p) : Pixel{-1, 0, 0};
        taps.gather(patches, pixel, threadIdx.x / AT_A_TIME, THREADS / AT_A_TIME, window, window4,
                    [&](int t, float v) { windows[p * window4 + t] = v; });
#pragma unroll 4
        for (int i = threadIdx.x; i < AT_A_TIME * s.o / 4; i += THREADS) {
            float v[4] = {};
            if (i < (end - at) * s.o / 4) load(dy + static_cast<i64>(at) * s.o + i * 4, v);
            room[AT_A_TIME * window4 / 4 + i] = make_float4(v[0], v[1], v[2], v[3]);
        }
        __syncthreads();
        if (!works) continue;
#pragma unroll 4
        for (int p = group; p < AT_A_TIME; p += groups)
            add_products(sum, four(gradients + p * s.o + o), four(windows + p * window4 + t));
    }
    // Over the groups, in their order: [group, 16, tile].
    __syncthreads();
    float* const sums = windows;
    if (works)
        for (int i = 0; i < 16; ++i) sums[(group * 16 + i) * group_size + tile] = sum[i / 4][i % 4];
    __syncthreads();
    if (group > 0 || !works) return;
    partial += static_cast<i64>(blockIdx.x) * s.o * window;
    for (int i = 0; i < 16; ++i) {
        float all = 0.0f;
        for (int g = 0; g < groups; ++g) all += sums[(g * 16 + i) * group_size + tile];
        if (t + i % 4 < window) partial[(o + i / 4) * window + t + i % 4] = all;
    }
}
