// The weight of a convolution in the order that products read, and its gradient back from it: a file of its own, so that a
// profile says what these copies take.
//
// filter_rows(w, rows, c, channels, taps, shift): T w [o, c, taps] as rows [o, taps, channels], zeros past c: what our
//   forward pass reads, and cuDNN. filter_back(rows, dw, c, channels, taps, shift): the other way, without what is past c.
//   run = 2^shift channels pass through shared memory at a time. grid (ceil(channels / run), o), block 256, dynamic
//   shared bytes run taps sizeof(T).

// Where a block of a filter's move stands: `count` channels from `first` on, `kept` of which the weight has. Element
// (channel, tap) of the weight is in shared memory at channel taps + tap, so both sides go to memory in order.
struct Slice {
    const int first, count, kept;

    DEVICE Slice(int c, int channels, int run)
        : first(blockIdx.x * run), count(min(run, channels - first)), kept(max(0, min(run, c - first))) {}

    DEVICE static int min(int a, int b) { return a < b ? a : b; }
    DEVICE static int max(int a, int b) { return a > b ? a : b; }
};

// A block's only loads: with several of a thread on their way, memory's latency is paid once and not for each.
enum : int { IN_FLIGHT = 9 };

// to(i) = from(i) for 0 <= i < n, over a block's threads.
template <class From, class To>
DEVICE void copy(int n, From from, To to) {
    for (int first = threadIdx.x; first < n; first += IN_FLIGHT * THREADS) {
        T held[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k)
            if (first + k * THREADS < n) held[k] = from(first + k * THREADS);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k)
            if (first + k * THREADS < n) to(first + k * THREADS, held[k]);
    }
}

KERNEL(256) filter_rows(const T* __restrict__ w, T* __restrict__ rows, int c, int channels, int taps, int shift) {
    extern __shared__ uint4 shared[];
    T* const slice = reinterpret_cast<T*>(shared);
    const int run = 1 << shift;
    const Slice at(c, channels, run);
    const T* const from = w + (static_cast<i64>(blockIdx.y) * c + at.first) * taps;
    T* const to = rows + static_cast<i64>(blockIdx.y) * taps * channels + at.first;
    const auto padded = [&](int i) { return i < at.kept * taps ? from[i] : from_f32<T>(0.0f); };
    copy(run * taps, padded, [&](int i, T x) { slice[i] = x; });
    __syncthreads();
    for (int i = threadIdx.x; i < run * taps; i += THREADS) {
        const int tap = i >> shift, channel = i & (run - 1);
        if (channel < at.count) to[static_cast<i64>(tap) * channels + channel] = slice[channel * taps + tap];
    }
}

KERNEL(256) filter_back(const T* __restrict__ rows, T* __restrict__ dw, int c, int channels, int taps, int shift) {
    extern __shared__ uint4 shared[];
    T* const slice = reinterpret_cast<T*>(shared);
    const int run = 1 << shift;
    const Slice at(c, channels, run);
    const T* const from = rows + static_cast<i64>(blockIdx.y) * taps * channels + at.first;
    T* const to = dw + (static_cast<i64>(blockIdx.y) * c + at.first) * taps;
    // Those past the last channel are read nowhere; the last one stands in for them.
    const auto row = [&](int i) { return from[static_cast<i64>(i >> shift) * channels + Slice::min(i & (run - 1), at.count - 1)]; };
    copy(run * taps, row, [&](int i, T x) { slice[(i & (run - 1)) * taps + (i >> shift)] = x; });
    __syncthreads();
    for (int i = threadIdx.x; i < at.kept * taps; i += THREADS) to[i] = slice[i];
}
