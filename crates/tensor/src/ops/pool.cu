// Pooling of channels-last images; the meaning is that of pool.rs.
//
// x, dx: T [batch, h, w, c]; y, dy: T [batch, oh, ow, c]. A thread makes N channels of one output pixel (of one
// input pixel in a backward pass, where it gathers from the windows that see the pixel, so sums have a fixed order);
// N = LANES (4 f32, 8 bf16) if c divides by it, else 1.
//
// pool_max_forward(x, y, places, relu, size): y, and where in its window each maximum is: u8 [batch, oh, ow, c], 16-byte
//   aligned, u kernel + v for row u and column v of the window, padding counted; kernel <= 15. With relu, what is not
//   above zero has the place NOWHERE.
// pool_max_forward_normed(x, scale, shift, wide, mean, rstd, y, places, relu, size): the same of what a batch norm makes of
//   x, with batch_norm_forward's bits; mean, rstd: f32 [c]; scale, shift: [c], f32 where `wide`, else T.
// pool_max_take(x, places, y, size): what x has at these places, of which none is NOWHERE.
// pool_max_backward(dy, places, dx, size); pool_max_backward_two likewise for stride 2 and windows of 2 or 3, where a
//   thread makes a square of 2 x 2 pixels, which the same windows see.
// pool_max_normed_sums(dy, places, x, mean, partial, rows, piece, size): batch_norm_gradient_sums of a gradient that is
//   never in memory, that of a pool's input: x is what the norm before the pool reads. Column geometry (lanes.cuh) over
//   the rows = batch oh ow of dy; partial: f32 [pieces, 2, c].
// pool_max_backward_normed, pool_max_backward_two_normed(dy, places, x, mean, line, dx, size): the gradient of that x, as
//   batch_norm_backward_input makes it of the pool's; line: f32 [3, c].
// pool_mean_forward(x, y, size), pool_mean_backward(dy, dx, size)
//   grid ceil(pixels c / N / 256), block 256; pixels = batch oh ow forward, batch h w backward, or as many squares: along a
//   side ceil((before + size) / 2) - before / 2. There are fewer than 2^32 threads.
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

enum : u32 { NOWHERE = 255 };

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

// What stands before the pool: nothing, or a batch norm, with the formulas of batch_norm.cu.
struct Plain {
    template <int N>
    struct Line {
        DEVICE Line(const Plain&, int) {}
        DEVICE void apply(float (&)[N]) const {}
        DEVICE void apply(i64, float (&)[N]) const {}
    };
};

struct Norm {
    Weights scale, shift;
    const float *mean, *rstd;

    template <int N>
    struct Line {
        float m[N], a[N], b[N];

        DEVICE Line(const Norm& norm, int channel) {
            float r[N];
            norm.scale.get(channel, a);
            norm.shift.get(channel, b);
            load(norm.mean + channel, m);
            load(norm.rstd + channel, r);
            for (int k = 0; k < N; ++k) a[k] *= r[k];
        }
        DEVICE void apply(float (&x)[N]) const {
            for (int k = 0; k < N; ++k) x[k] = rounded<T>(fmaf(x[k] - m[k], a[k], b[k]));
        }
    };
};

struct NormGradient {
    const T* x;
    const float *mean, *line;
    int c;

    template <int N>
    struct Line {
        const T* x;
        float m[N], a[N], b[N], d[N];

        DEVICE Line(const NormGradient& norm, int channel) : x(norm.x) {
            load(norm.mean + channel, m);
            load(norm.line + channel, a);
            load(norm.line + norm.c + channel, b);
            load(norm.line + 2 * norm.c + channel, d);
        }
        DEVICE void apply(i64 at, float (&g)[N]) const {
            float v[N];
            load(x + at, v);
            for (int k = 0; k < N; ++k) g[k] = a[k] * g[k] + (b[k] * (v[k] - m[k]) + d[k]);
        }
    };
};

// K: the window's side, 0 where it is known at run time only.
template <int N, int K, class Before>
DEVICE void max_forward(const T* __restrict__ x, const Before& before, T* __restrict__ y, u8* __restrict__ places,
                        bool relu, const Size& s) {
    const Place p = place<N>(s, s.rows.count, s.columns.count);
    if (!p.inside) return;
    const int kernel = K ? K : s.kernel, line = s.columns.size * s.c;
    const int top = p.i * s.stride - s.rows.before, left = p.j * s.stride - s.columns.before;
    x += (p.image * s.rows.size + top) * line + static_cast<i64>(left) * s.c + p.channel;
    const typename Before::template Line<N> norm(before, p.channel);
    float best[N];
    u32 where[N];
    for (int k = 0; k < N; ++k) best[k] = -INFINITY_F, where[k] = max(-top, 0) * kernel + max(-left, 0);
#pragma unroll
    for (int u = 0; u < kernel; ++u) {
#pragma unroll
        for (int v = 0; v < kernel; ++v) {
            float seen[N];
            // What lies past the image is larger than nothing; loads without branches between them run side by side.
            for (int k = 0; k < N; ++k) seen[k] = -INFINITY_F;
            if (static_cast<u32>(top + u) < static_cast<u32>(s.rows.size) &&
                static_cast<u32>(left + v) < static_cast<u32>(s.columns.size)) {
                load(x + (u * line + v * s.c), seen);
                norm.apply(seen);
            }
            for (int k = 0; k < N; ++k) {
                const bool larger = seen[k] > best[k] || seen[k] != seen[k];
                best[k] = larger ? seen[k] : best[k];
                where[k] = larger ? u * kernel + v : where[k];
            }
        }
    }
    for (int k = 0; k < N; ++k) {
        where[k] = relu && !(best[k] > 0.0f) ? NOWHERE : where[k];
        best[k] = relu && best[k] < 0.0f ? 0.0f : best[k];
    }
    store(y + p.index, best);
    store_bytes(places + p.index, where);
}

template <int N>
DEVICE void max_take(const T* __restrict__ x, const u8* __restrict__ places, T* __restrict__ y, const Size& s) {
    const Place p = place<N>(s, s.rows.count, s.columns.count);
    if (!p.inside) return;
    const int top = p.i * s.stride - s.rows.before, left = p.j * s.stride - s.columns.before;
    x += p.image * s.rows.size * s.columns.size * s.c + p.channel;
    u32 where[N];
    load_bytes(places + p.index, where);
    float taken[N];
    for (int k = 0; k < N; ++k) {
        const i64 i = top + static_cast<int>(where[k]) / s.kernel, j = left + static_cast<int>(where[k]) % s.kernel;
        taken[k] = to_f32(x[(i * s.columns.size + j) * s.c + k]);
    }
    store(y + p.index, taken);
}

// B x B pixels, counted from the first one of padding on; if B > 1 that is the stride, so one window begins with them,
// and those before it see them too.
template <int N, int B, int K, class Before>
DEVICE void max_backward(const T* __restrict__ dy, const u8* __restrict__ places, const Before& before, T* __restrict__ dx,
                         const Size& s) {
    const int kernel = K ? K : s.kernel, stride = B > 1 ? B : s.stride;
    const int above = s.rows.before / B, beside = s.columns.before / B;
    const Place p = place<N>(s, (s.rows.before + s.rows.size + B - 1) / B - above,
                             (s.columns.before + s.columns.size + B - 1) / B - beside);
    if (!p.inside) return;
    const int first_i = (p.i + above) * B, first_j = (p.j + beside) * B;
    const int window_i = B > 1 ? p.i + above : first_i / stride, window_j = B > 1 ? p.j + beside : first_j / stride;
    const int into_i = B > 1 ? 0 : first_i - window_i * stride, into_j = B > 1 ? 0 : first_j - window_j * stride;
    const i64 image = p.image * s.rows.count * s.columns.count * s.c + p.channel;
    const typename Before::template Line<N> norm(before, p.channel);
    float sum[B][B][N] = {};
    // From the first window that sees them on, as on the host: sums have one order.
#pragma unroll
    for (int back_i = (kernel - 1) / stride; back_i >= 0; --back_i) {
#pragma unroll
        for (int back_j = (kernel - 1) / stride; back_j >= 0; --back_j) {
            const int i = window_i - back_i, j = window_j - back_j;
            if (static_cast<u32>(i) >= static_cast<u32>(s.rows.count) ||
                static_cast<u32>(j) >= static_cast<u32>(s.columns.count))
                continue;
            const i64 at = image + static_cast<i64>(i * s.columns.count + j) * s.c;
            float d[N];
            u32 where[N];
            load(dy + at, d);
            load_bytes(places + at, where);
#pragma unroll
            for (int square = 0; square < B * B; ++square) {
                const int u = into_i + back_i * stride + square / B, v = into_j + back_j * stride + square % B;
                if (u >= kernel || v >= kernel) continue;
                const u32 own = u * kernel + v;
                for (int k = 0; k < N; ++k) sum[square / B][square % B][k] += where[k] == own ? d[k] : 0.0f;
            }
        }
    }
#pragma unroll
    for (int square = 0; square < B * B; ++square) {
        const int i = first_i + square / B - s.rows.before, j = first_j + square % B - s.columns.before;
        if (i < 0 || i >= s.rows.size || j < 0 || j >= s.columns.size) continue;
        const i64 at = ((p.image * s.rows.size + i) * s.columns.size + j) * s.c + p.channel;
        norm.apply(at, sum[square / B][square % B]);
        store(dx + at, sum[square / B][square % B]);
    }
}

template <int N, int K>
DEVICE void normed_sums(const T* __restrict__ dy, const u8* __restrict__ places, const T* __restrict__ x,
                        const float* __restrict__ mean, float* __restrict__ partial, i64 rows, i64 piece, const Size& s) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    const i64 start = blockIdx.y * piece, end = start + piece < rows ? start + piece : rows;
    const u32 kernel = K ? K : s.kernel;
    float sum[N] = {}, product[N] = {};
    if (column < s.c) {
        float m[N];
        load(mean + column, m);
#pragma unroll 4
        for (i64 row = start + threadIdx.y; row < end; row += blockDim.y) {
            const u32 line = static_cast<u32>(row) / s.columns.count, image = line / s.rows.count;
            const int top = line % s.rows.count * s.stride - s.rows.before;
            const int left = static_cast<u32>(row) % s.columns.count * s.stride - s.columns.before;
            const T* const window = x + ((static_cast<i64>(image) * s.rows.size + top) * s.columns.size + left) * s.c + column;
            float d[N];
            u32 where[N];
            load(dy + row * s.c + column, d);
            load_bytes(places + row * s.c + column, where);
            for (int k = 0; k < N; ++k) {
                const bool open = where[k] != NOWHERE;
                const i64 pixel = static_cast<i64>(where[k] / kernel) * s.columns.size + where[k] % kernel;
                sum[k] += open ? d[k] : 0.0f;
                product[k] += open ? d[k] * (to_f32(window[pixel * s.c + k]) - m[k]) : 0.0f;
            }
        }
    }
    sum_over_y(sum);
    sum_over_y(product);
    if (threadIdx.y == 0 && column < s.c) {
        store(partial + blockIdx.y * 2 * s.c + column, sum);
        store(partial + (blockIdx.y * 2 + 1) * s.c + column, product);
    }
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

// Calls run(Width<N>()) with as many lanes as channels divide by, and run(Width<K>()) with the window's side.
template <class Run>
DEVICE void by_lanes(const Size& s, Run run) {
    if (s.c % LANES == 0)
        run(Width<LANES>());
    else
        run(Width<1>());
}

template <class Run>
DEVICE void by_window(const Size& s, Run run) {
    if (s.kernel == 3)
        run(Width<3>());
    else if (s.kernel == 2)
        run(Width<2>());
    else
        run(Width<0>());
}

template <class Before>
DEVICE void forward(const T* x, const Before& before, T* y, u8* places, bool relu, const Size& s) {
    by_lanes(s, [&](auto n) {
        by_window(s, [&](auto k) {
            max_forward<decltype(n)::value, decltype(k)::value>(x, before, y, places, relu, s);
        });
    });
}

template <class Before>
DEVICE void backward_two(const T* dy, const u8* places, const Before& before, T* dx, const Size& s) {
    by_lanes(s, [&](auto n) {
        if (s.kernel == 3)
            max_backward<decltype(n)::value, 2, 3>(dy, places, before, dx, s);
        else
            max_backward<decltype(n)::value, 2, 2>(dy, places, before, dx, s);
    });
}

KERNEL(256) pool_max_forward(const T* x, T* y, u8* places, int relu, Size s) { forward(x, Plain(), y, places, relu, s); }

KERNEL(256) pool_max_forward_normed(const T* x, const void* scale, const void* shift, int wide, const float* mean,
                                    const float* rstd, T* y, u8* places, int relu, Size s) {
    forward(x, Norm{{scale, wide}, {shift, wide}, mean, rstd}, y, places, relu, s);
}

KERNEL(256) pool_max_take(const T* x, const u8* places, T* y, Size s) {
    by_lanes(s, [&](auto n) { max_take<decltype(n)::value>(x, places, y, s); });
}

KERNEL(256) pool_max_backward(const T* dy, const u8* places, T* dx, Size s) {
    by_lanes(s, [&](auto n) { max_backward<decltype(n)::value, 1, 0>(dy, places, Plain(), dx, s); });
}

KERNEL(256) pool_max_backward_normed(const T* dy, const u8* places, const T* x, const float* mean, const float* line,
                                     T* dx, Size s) {
    const NormGradient norm = {x, mean, line, s.c};
    by_lanes(s, [&](auto n) { max_backward<decltype(n)::value, 1, 0>(dy, places, norm, dx, s); });
}

KERNEL(256) pool_max_backward_two(const T* dy, const u8* places, T* dx, Size s) {
    backward_two(dy, places, Plain(), dx, s);
}

KERNEL(256) pool_max_backward_two_normed(const T* dy, const u8* places, const T* x, const float* mean,
                                         const float* line, T* dx, Size s) {
    backward_two(dy, places, NormGradient{x, mean, line, s.c}, dx, s);
}

KERNEL(256) pool_max_normed_sums(const T* dy, const u8* places, const T* x, const float* mean, float* partial, i64 rows,
                                 i64 piece, Size s) {
    by_lanes(s, [&](auto n) {
        by_window(s, [&](auto k) {
            normed_sums<decltype(n)::value, decltype(k)::value>(dy, places, x, mean, partial, rows, piece, s);
        });
    });
}

KERNEL(256) pool_global_mean(const T* x, T* y, i64 pixels, i64 of, i64 c) {
    if (c % LANES == 0)
        global_mean<LANES>(x, y, pixels, of, c);
    else
        global_mean<1>(x, y, pixels, of, c);
}

KERNEL(256) pool_mean_forward(const T* x, T* y, Size s) {
    by_lanes(s, [&](auto n) { mean_forward<decltype(n)::value>(x, y, s); });
}

KERNEL(256) pool_mean_backward(const T* dy, T* dx, Size s) {
    by_lanes(s, [&](auto n) { mean_backward<decltype(n)::value>(dy, dx, s); });
}
