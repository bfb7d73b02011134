// Pooling of channels-last images; the meaning is that of pool.rs.
//
// x, dx: T [batch, h, w, c]; y, dy: T [batch, oh, ow, c]. A thread makes N channels of one output pixel (of one
// input pixel in a backward pass, where it gathers from the windows that see the pixel, so sums have a fixed order);
// N = LANES (4 f32, 8 bf16) if c divides by it, else 1.
//
// pool_max_forward(x, y, places, size): y, and where in its window (rows first) each maximum is; either may be null.
//   places: u8 [batch, oh, ow, c], 16-byte aligned; kernel <= 16 if it is given.
// pool_max_take(x, places, y, size): what x has at these places.
// pool_max_backward(dy, places, dx, size): from the places, which a second pool_max_forward without y finds.
// pool_max_backward_apart(dy, x, dx, size): the same where every pixel lies in one window (kernel = stride, h = oh kernel, w = ow kernel,
//   no padding): a thread finds the maximum of its window again and writes all of the window's gradients.
// pool_mean_forward(x, y, size), pool_mean_backward(dy, dx, size)
//   grid ceil(pixels c / N / 256), block 256; pixels = batch oh ow forward and apart, batch h w in the other backward passes.
//   There are fewer than 2^32 threads.
// pool_global_mean(x, y, pixels, of, c): y: T [batch, c], the sum of each image's h w pixels over the `of` that it is a
//   tile of, with more threads on each than pool_mean_forward has. Column geometry (lanes.cuh) with one piece per
//   image: grid.y = batch <= 65535.
// With kernel = 0 windows cover the image that x is a tile of (adaptive; one window is the global mean), else they are
// those of kernel, stride and padding. Size: twelve ints, by value.

// Along a side: pixels of x, windows, pixels before x's first (of padding, or of the image that x is a tile of), and
// pixels of that image.
struct Side {
    int size, count, before, whole;
};

struct Size {
    int batch, c, kernel, stride;
    Side rows, columns;
};

struct Range {
    int start, end;
};

// Where window i begins and ends along a side, counted from x's first pixel.
DEVICE Range reach(const Size& s, const Side& side, int i) {
    if (s.kernel == 0)
        return {static_cast<int>(static_cast<i64>(i) * side.whole / side.count) - side.before,
                static_cast<int>((static_cast<i64>(i + 1) * side.whole + side.count - 1) / side.count) - side.before};
    const int start = i * s.stride - side.before;
    return {start, start + s.kernel};
}

// The pixels of x that window i sees.
DEVICE Range window(const Size& s, const Side& side, int i) {
    const Range all = reach(s, side, i);
    return {max(all.start, 0), min(all.end, side.size)};
}

// Over how many pixels of a side the mean of window i is taken: those of the image, be they in x or not.
DEVICE int length(const Size& s, const Side& side, int i) {
    const Range counted = s.kernel == 0 ? reach(s, side, i) : window(s, side, i);
    return counted.end - counted.start;
}

// The windows that see a pixel of x.
DEVICE Range seen_by(const Size& s, const Side& side, int pixel) {
    const int at = pixel + side.before;
    if (s.kernel == 0)
        return {static_cast<int>(static_cast<i64>(at) * side.count / side.whole),
                static_cast<int>((static_cast<i64>(at + 1) * side.count + side.whole - 1) / side.whole)};
    const int last = at / s.stride, before = at - s.kernel;
    return {before < 0 ? 0 : before / s.stride + 1, min(last + 1, side.count)};
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

// N bytes at once, N = 1, 4 or 8.
template <int N>
DEVICE void store_bytes(u8* at, const u32 (&x)[N]) {
    if constexpr (N == 1) {
        *at = static_cast<u8>(x[0]);
    } else {
        u32 words[N / 4];
        for (int k = 0; k < N / 4; ++k)
            words[k] = x[4 * k] | x[4 * k + 1] << 8 | x[4 * k + 2] << 16 | x[4 * k + 3] << 24;
        if constexpr (N == 4) *reinterpret_cast<u32*>(at) = words[0];
        if constexpr (N == 8) *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    }
}

template <int N>
DEVICE void load_bytes(const u8* at, u32 (&x)[N]) {
    if constexpr (N == 1) {
        x[0] = *at;
    } else {
        u32 words[2];
        if constexpr (N == 4) words[0] = *reinterpret_cast<const u32*>(at);
        if constexpr (N == 8) {
            const uint2 both = *reinterpret_cast<const uint2*>(at);
            words[0] = both.x, words[1] = both.y;
        }
        for (int k = 0; k < N; ++k) x[k] = words[k / 4] >> (k % 4 * 8) & 255;
    }
}

// Calls visit(at, offset) for each pixel that is seen, rows first: its number in the window, and how far it is from the image's first.
template <class Visit>
DEVICE void each_pixel(const Size& s, Range rows, Range columns, Visit visit) {
    u32 at = 0;
    for (int i = rows.start; i < rows.end; ++i)
        for (int j = columns.start; j < columns.end; ++j, ++at)
            visit(at, (static_cast<i64>(i) * s.columns.size + j) * s.c);
}

// The largest of a window and where in it they are; x stands at the image's first pixel.
template <int N>
DEVICE void largest(const T* __restrict__ x, const Size& s, Range rows, Range columns, float (&best)[N], u32 (&where)[N]) {
    each_pixel(s, rows, columns, [&](u32 at, i64 offset) {
        float v[N];
        load(x + offset, v);
        for (int k = 0; k < N; ++k) {
            // A NaN, once found, stays.
            const bool larger = at == 0 || v[k] > best[k] || (nan(v[k]) && !nan(best[k]));
            best[k] = larger ? v[k] : best[k];
            where[k] = larger ? at : where[k];
        }
    });
}

template <int N>
DEVICE void max_forward(const T* __restrict__ x, T* __restrict__ y, u8* __restrict__ places, const Size& s) {
    const Place p = place<N>(s, s.rows.count, s.columns.count);
    if (!p.inside) return;
    float best[N];
    u32 where[N] = {};
    largest(x + p.image * s.rows.size * s.columns.size * s.c + p.channel, s, window(s, s.rows, p.i),
            window(s, s.columns, p.j), best, where);
    if (y) store(y + p.index, best);
    if (places) store_bytes(places + p.index, where);
}

template <int N>
DEVICE void max_take(const T* __restrict__ x, const u8* __restrict__ places, T* __restrict__ y, const Size& s) {
    const Place p = place<N>(s, s.rows.count, s.columns.count);
    if (!p.inside) return;
    const Range rows = window(s, s.rows, p.i), columns = window(s, s.columns, p.j);
    x += p.image * s.rows.size * s.columns.size * s.c + p.channel;
    const u32 across = columns.end - columns.start;
    u32 where[N];
    load_bytes(places + p.index, where);
    float taken[N];
    for (int k = 0; k < N; ++k) {
        const i64 i = rows.start + where[k] / across, j = columns.start + where[k] % across;
        taken[k] = to_f32(x[(i * s.columns.size + j) * s.c + k]);
    }
    store(y + p.index, taken);
}

template <int N>
DEVICE void max_backward(const T* __restrict__ dy, const u8* __restrict__ places, T* __restrict__ dx, const Size& s) {
    const Place p = place<N>(s, s.rows.size, s.columns.size);
    if (!p.inside) return;
    const Range above = seen_by(s, s.rows, p.i), beside = seen_by(s, s.columns, p.j);
    const i64 image = p.image * s.rows.count * s.columns.count * s.c + p.channel;
    float sum[N] = {};
    for (int i = above.start; i < above.end; ++i) {
        const Range rows = window(s, s.rows, i);
        for (int j = beside.start; j < beside.end; ++j) {
            const Range columns = window(s, s.columns, j);
            const u32 own = (p.i - rows.start) * (columns.end - columns.start) + p.j - columns.start;
            const i64 at = image + (static_cast<i64>(i) * s.columns.count + j) * s.c;
            float d[N];
            u32 where[N];
            load(dy + at, d);
            load_bytes(places + at, where);
            for (int k = 0; k < N; ++k) sum[k] += where[k] == own ? d[k] : 0.0f;
        }
    }
    store(dx + p.index, sum);
}

template <int N>
DEVICE void max_backward_apart(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, const Size& s) {
    const Place p = place<N>(s, s.rows.count, s.columns.count);
    if (!p.inside) return;
    const Range rows = {p.i * s.kernel, (p.i + 1) * s.kernel}, columns = {p.j * s.kernel, (p.j + 1) * s.kernel};
    const i64 image = p.image * s.rows.size * s.columns.size * s.c + p.channel;
    float best[N], d[N];
    u32 where[N] = {};
    load(dy + p.index, d);
    largest(x + image, s, rows, columns, best, where);
    each_pixel(s, rows, columns, [&](u32 at, i64 offset) {
        float own[N];
        for (int k = 0; k < N; ++k) own[k] = where[k] == at ? d[k] : 0.0f;
        store(dx + image + offset, own);
    });
}

template <int N>
DEVICE void mean_forward(const T* __restrict__ x, T* __restrict__ y, const Size& s) {
    const Place p = place<N>(s, s.rows.count, s.columns.count);
    if (!p.inside) return;
    const Range rows = window(s, s.rows, p.i), columns = window(s, s.columns, p.j);
    x += p.image * s.rows.size * s.columns.size * s.c + p.channel;
    float sum[N] = {};
    for (int i = rows.start; i < rows.end; ++i) {
#pragma unroll 8
        for (int j = columns.start; j < columns.end; ++j) {
            float v[N];
            load(x + (static_cast<i64>(i) * s.columns.size + j) * s.c, v);
            for (int k = 0; k < N; ++k) sum[k] += v[k];
        }
    }
    const float share = 1.0f / (length(s, s.rows, p.i) * length(s, s.columns, p.j));
    for (int k = 0; k < N; ++k) sum[k] *= share;
    store(y + p.index, sum);
}

template <int N>
DEVICE void mean_backward(const T* __restrict__ dy, T* __restrict__ dx, const Size& s) {
    const Place p = place<N>(s, s.rows.size, s.columns.size);
    if (!p.inside) return;
    const Range above = seen_by(s, s.rows, p.i), beside = seen_by(s, s.columns, p.j);
    dy += p.image * s.rows.count * s.columns.count * s.c + p.channel;
    float sum[N] = {};
    for (int i = above.start; i < above.end; ++i) {
        for (int j = beside.start; j < beside.end; ++j) {
            const float share = 1.0f / (length(s, s.rows, i) * length(s, s.columns, j));
            float d[N];
            load(dy + (static_cast<i64>(i) * s.columns.count + j) * s.c, d);
            for (int k = 0; k < N; ++k) sum[k] += d[k] * share;
        }
    }
    store(dx + p.index, sum);
}

template <int N>
DEVICE void global_mean(const T* __restrict__ x, T* __restrict__ y, i64 pixels, i64 of, i64 c) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    float sum[N] = {};
    if (column < c) {
        x += blockIdx.y * pixels * c + column;
#pragma unroll 4
        for (i64 i = threadIdx.y; i < pixels; i += blockDim.y) {
            float v[N];
            load(x + i * c, v);
            for (int k = 0; k < N; ++k) sum[k] += v[k];
        }
    }
    sum_over_y(sum);
    for (int k = 0; k < N; ++k) sum[k] *= 1.0f / of;
    if (threadIdx.y == 0 && column < c) store(y + blockIdx.y * c + column, sum);
}

KERNEL(256) pool_max_forward(const T* x, T* y, u8* places, Size s) {
    if (s.c % LANES == 0)
        max_forward<LANES>(x, y, places, s);
    else
        max_forward<1>(x, y, places, s);
}

KERNEL(256) pool_max_take(const T* x, const u8* places, T* y, Size s) {
    if (s.c % LANES == 0)
        max_take<LANES>(x, places, y, s);
    else
        max_take<1>(x, places, y, s);
}

KERNEL(256) pool_max_backward(const T* dy, const u8* places, T* dx, Size s) {
    if (s.c % LANES == 0)
        max_backward<LANES>(dy, places, dx, s);
    else
        max_backward<1>(dy, places, dx, s);
}

KERNEL(256) pool_max_backward_apart(const T* dy, const T* x, T* dx, Size s) {
    if (s.c % LANES == 0)
        max_backward_apart<LANES>(dy, x, dx, s);
    else
        max_backward_apart<1>(dy, x, dx, s);
}

KERNEL(256) pool_global_mean(const T* x, T* y, i64 pixels, i64 of, i64 c) {
    if (c % LANES == 0)
        global_mean<LANES>(x, y, pixels, of, c);
    else
        global_mean<1>(x, y, pixels, of, c);
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
