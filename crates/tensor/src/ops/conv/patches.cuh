// Which element of an image a product reads: pixels, the taps of a window, and the patches of both passes.

struct Shape {
    int batch, h, w, c, oh, ow, o, kernel, stride, top, left;
};

// A place in the window: row u, column v, and a channel; the channel is -1 past the window's end.
struct Tap {
    int u, v, channel;
};

DEVICE Tap tap(int at, int channels, int kernel) {
    const u32 uv = static_cast<u32>(at) / static_cast<u32>(channels);
    const int u = uv / static_cast<u32>(kernel);
    return {u, static_cast<int>(uv) - u * kernel, u < kernel ? at - static_cast<int>(uv) * channels : -1};
}

// The tap `steps` further on, for steps that are few against the channels: without a division.
DEVICE void advance(Tap& t, int steps, int channels, int kernel) {
    if (t.channel < 0) return;
    t.channel += steps;
    while (t.channel >= channels) {
        t.channel -= channels;
        if (++t.v == kernel) t.v = 0, ++t.u;
        if (t.u == kernel) t.channel = -1;
    }
}

DEVICE Tap further(Tap t, int steps, int channels, int kernel) {
    advance(t, steps, channels, kernel);
    return t;
}

// A pixel: where its image starts, and where its window does; `image` is -1 past the last one.
struct Pixel {
    i64 image;
    int top, left;
};

// The patches of x under the pixels of y.
template <class E>
struct Forward {
    const E* x;
    Shape s;

    DEVICE int rows() const { return s.batch * s.oh * s.ow; }
    DEVICE int columns() const { return s.o; }
    DEVICE int channels() const { return s.c; }
    // Pixel (i, j) of image n.
    struct Walk {
        int n, i, j;
    };
    DEVICE Walk start(int at) const {
        const u32 row = static_cast<u32>(at) / s.ow, n = row / s.oh;
        return {static_cast<int>(n), static_cast<int>(row - n * s.oh), static_cast<int>(at - row * s.ow)};
    }
    DEVICE void advance(Walk& walk, int steps) const {
        walk.j += steps;
        while (walk.j >= s.ow) {
            walk.j -= s.ow;
            if (++walk.i == s.oh) walk.i = 0, ++walk.n;
        }
    }
    DEVICE Pixel pixel(const Walk& at) const {
        return {static_cast<i64>(at.n) * s.h * s.w * s.c, at.i * s.stride - s.top, at.j * s.stride - s.left};
    }
    DEVICE Pixel pixel(int at) const { return at < rows() ? pixel(start(at)) : Pixel{-1, 0, 0}; }
    DEVICE const E* find(const Pixel& p, const Tap& t) const {
        const int i = p.top + t.u, j = p.left + t.v;
        const bool inside = p.image >= 0 && t.channel >= 0 && static_cast<u32>(i) < s.h && static_cast<u32>(j) < s.w;
        return inside ? x + p.image + (static_cast<i64>(i) * s.w + j) * s.c + t.channel : nullptr;
    }
};

// The elements of dy that saw each pixel of x.
template <class E>
struct Backward {
    const E* x;
    Shape s;

    DEVICE int rows() const { return s.batch * s.h * s.w; }
    DEVICE int columns() const { return s.c; }
    DEVICE int channels() const { return s.o; }
    DEVICE Pixel pixel(int at) const {
        if (at >= rows()) return {-1, 0, 0};
        const u32 row = static_cast<u32>(at) / s.w, n = row / s.h;
        return {static_cast<i64>(n) * s.oh * s.ow * s.o, static_cast<int>(row - n * s.h) + s.top,
                static_cast<int>(at - row * s.w) + s.left};
    }
    DEVICE const E* find(const Pixel& p, const Tap& t) const {
        int i = p.top - t.u, j = p.left - t.v;
        bool inside = p.image >= 0 && t.channel >= 0 && i >= 0 && j >= 0;
        if (s.stride == 2) {
            inside &= ((i | j) & 1) == 0;
            i >>= 1, j >>= 1;
        } else if (s.stride > 2) {
            inside &= i % s.stride == 0 && j % s.stride == 0;
            i /= s.stride, j /= s.stride;
        }
        inside &= i < s.oh && j < s.ow;
        return inside ? x + p.image + (static_cast<i64>(i) * s.ow + j) * s.o + t.channel : nullptr;
    }
};

// A row of a plain matrix [rows, width], or null.
template <class E>
DEVICE const E* element(const E* matrix, int row, int rows, int column, int width) {
    return row < rows && column < width ? matrix + static_cast<i64>(row) * width + column : nullptr;
}

// The V elements that find(0), find(1), .. point to; zeros where they are null. Where `vector`, they are neighbours.
template <int V, class E, class Find>
DEVICE Pack<E> collect(bool vector, Find find) {
    Pack<E> pack = {};
    if (vector) {
        const E* const at = find(0);
        if (at) pack = load_pack(at);
    } else {
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const E* const at = find(k);
            if (at) pack.v[k] = *at;
        }
    }
    return pack;
}
