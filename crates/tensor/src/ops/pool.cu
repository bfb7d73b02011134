// Pooling of channels-last images; the meaning is that of pool.rs.
//
// x, dx: T [batch, h, w, c]; y, dy: T [batch, oh, ow, c]. A thread makes N channels of one output pixel (of one
// input pixel in a backward pass, where it gathers from the windows that see the pixel, so sums have a fixed order);
// N = LANES (4 f32, 8 bf16) if c divides by it, else 1.
//
// pool_max_forward(x, y, size), pool_max_backward(dy, x, dx, size),
// pool_mean_forward(x, y, size), pool_mean_backward(dy, dx, size)
//   grid ceil(pixels c / N / 256), block 256; pixels = batch oh ow forward, batch h w backward.
//   There are fewer than 2^32 threads.
// With kernel = 0 windows cover the image (adaptive; oh = ow = 1 is the global mean), else they are those of
// kernel, stride and padding.

struct Size {
    int batch, h, w, c, oh, ow, kernel, stride, padding;
};

struct Range {
    int start, end;
};

// The pixels along a side that window i of `count` sees.
DEVICE Range window(const Size& s, int i, int side, int count) {
    if (s.kernel == 0)
        return {static_cast<int>(static_cast<i64>(i) * side / count),
                static_cast<int>((static_cast<i64>(i + 1) * side + count - 1) / count)};
    const int start = i * s.stride - s.padding;
    return {max(start, 0), min(start + s.kernel, side)};
}

// The windows that see a pixel.
DEVICE Range seen_by(const Size& s, int pixel, int side, int count) {
    if (s.kernel == 0)
        return {static_cast<int>(static_cast<i64>(pixel) * count / side),
                static_cast<int>((static_cast<i64>(pixel + 1) * count + side - 1) / side)};
    const int last = (pixel + s.padding) / s.stride, before = pixel + s.padding - s.kernel;
    return {before < 0 ? 0 : before / s.stride + 1, min(last + 1, count)};
}

// What a thread makes: pixel (i, j) of image n of a [batch, height, width, c], from channel `channel` on.
struct Place {
    i64 index, image;
    int i, j, channel;
    bool inside;
};

template <int N>
DEVICE Place place(const Size& s, int height, int width) {
    const u32 thread = static_cast<u32>(thread_in_grid());
    const u32 groups = s.c / N, pixel = thread / groups, row = pixel / width;
    Place p;
    p.channel = thread % groups * N;
    p.index = static_cast<i64>(pixel) * s.c + p.channel;
    p.image = row / height;
    p.i = row % height, p.j = pixel % width;
    p.inside = p.image < s.batch;
    return p;
}

DEVICE bool nan(float x) { return x != x; }

template <int N>
DEVICE void max_forward(const T* __restrict__ x, T* __restrict__ y, const Size& s) {
    const Place p = place<N>(s, s.oh, s.ow);
    if (!p.inside) return;
    const Range rows = window(s, p.i, s.h, s.oh), columns = window(s, p.j, s.w, s.ow);
    x += p.image * s.h * s.w * s.c + p.channel;
    float best[N];
    load(x + (static_cast<i64>(rows.start) * s.w + columns.start) * s.c, best);
    for (int i = rows.start; i < rows.end; ++i)
        for (int j = columns.start; j < columns.end; ++j) {
            float v[N];
            load(x + (static_cast<i64>(i) * s.w + j) * s.c, v);
            for (int k = 0; k < N; ++k) best[k] = v[k] > best[k] || nan(v[k]) ? v[k] : best[k];
        }
    store(y + p.index, best);
}

// Whether the pixel (pi, pj), holding `own`, is the first maximum of its window; a NaN is larger than any number.
template <int N>
DEVICE void first_largest(const T* __restrict__ x, const Size& s, Range rows, Range columns, int pi, int pj,
                          const float (&own)[N], bool (&first)[N]) {
    for (int k = 0; k < N; ++k) first[k] = true;
    for (int i = rows.start; i < rows.end; ++i)
        for (int j = columns.start; j < columns.end; ++j) {
            const bool before = i < pi || (i == pi && j < pj);
            if (i == pi && j == pj) continue;
            float v[N];
            load(x + (static_cast<i64>(i) * s.w + j) * s.c, v);
            for (int k = 0; k < N; ++k) {
                const bool beats = before ? v[k] >= own[k] || nan(v[k]) : v[k] > own[k] || (nan(v[k]) && !nan(own[k]));
                first[k] &= !beats;
            }
        }
}

template <int N>
DEVICE void max_backward(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, const Size& s) {
    const Place p = place<N>(s, s.h, s.w);
    if (!p.inside) return;
    const Range above = seen_by(s, p.i, s.h, s.oh), beside = seen_by(s, p.j, s.w, s.ow);
    float own[N], sum[N] = {};
    load(x + p.index, own);
    x += p.image * s.h * s.w * s.c + p.channel;
    dy += p.image * s.oh * s.ow * s.c + p.channel;
    for (int i = above.start; i < above.end; ++i)
        for (int j = beside.start; j < beside.end; ++j) {
            bool first[N];
            float d[N];
            first_largest(x, s, window(s, i, s.h, s.oh), window(s, j, s.w, s.ow), p.i, p.j, own, first);
            load(dy + (static_cast<i64>(i) * s.ow + j) * s.c, d);
            for (int k = 0; k < N; ++k) sum[k] += first[k] ? d[k] : 0.0f;
        }
    store(dx + p.index, sum);
}

template <int N>
DEVICE void mean_forward(const T* __restrict__ x, T* __restrict__ y, const Size& s) {
    const Place p = place<N>(s, s.oh, s.ow);
    if (!p.inside) return;
    const Range rows = window(s, p.i, s.h, s.oh), columns = window(s, p.j, s.w, s.ow);
    x += p.image * s.h * s.w * s.c + p.channel;
    float sum[N] = {};
    for (int i = rows.start; i < rows.end; ++i) {
#pragma unroll 8
        for (int j = columns.start; j < columns.end; ++j) {
            float v[N];
            load(x + (static_cast<i64>(i) * s.w + j) * s.c, v);
            for (int k = 0; k < N; ++k) sum[k] += v[k];
        }
    }
    const float share = 1.0f / ((rows.end - rows.start) * (columns.end - columns.start));
    for (int k = 0; k < N; ++k) sum[k] *= share;
    store(y + p.index, sum);
}

template <int N>
DEVICE void mean_backward(const T* __restrict__ dy, T* __restrict__ dx, const Size& s) {
    const Place p = place<N>(s, s.h, s.w);
    if (!p.inside) return;
    const Range above = seen_by(s, p.i, s.h, s.oh), beside = seen_by(s, p.j, s.w, s.ow);
    dy += p.image * s.oh * s.ow * s.c + p.channel;
    float sum[N] = {};
    for (int i = above.start; i < above.end; ++i) {
        const Range rows = window(s, i, s.h, s.oh);
        for (int j = beside.start; j < beside.end; ++j) {
            const Range columns = window(s, j, s.w, s.ow);
            const float share = 1.0f / ((rows.end - rows.start) * (columns.end - columns.start));
            float d[N];
            load(dy + (static_cast<i64>(i) * s.ow + j) * s.c, d);
            for (int k = 0; k < N; ++k) sum[k] += d[k] * share;
        }
    }
    store(dx + p.index, sum);
}

KERNEL(256) pool_max_forward(const T* x, T* y, Size s) {
    if (s.c % LANES == 0)
        max_forward<LANES>(x, y, s);
    else
        max_forward<1>(x, y, s);
}

KERNEL(256) pool_max_backward(const T* dy, const T* x, T* dx, Size s) {
    if (s.c % LANES == 0)
        max_backward<LANES>(dy, x, dx, s);
    else
        max_backward<1>(dy, x, dx, s);
}

KERNEL(256) pool_mean_forward(const T* x, T* y, Size s) {
    if (s.c % LANES == 0)
        mean_forward<LANES>(x, y, s);
    else
        mean_forward<1>(x, y, s);
}

KERNEL(256) pool_mean_backward(const T* dy, T* dx, Size s) {
    if (s.c % LANES == 0)
        mean_backward<LANES>(dy, dx, s);
    else
        mean_backward<1>(dy, dx, s);
}
