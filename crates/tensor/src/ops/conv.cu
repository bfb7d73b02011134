// Convolution of channels-last images as a matrix product whose left matrix, the patches, is never stored: tiles of
// it are gathered from the images on their way to shared memory. The meaning is that of conv.rs.
//
// x, dx: T [batch, h, w, c]; w, dw: T [o, c, k, k]; bias: T [o] or null; y, dy: T [batch, oh, ow, o].
// Shape: ten ints, by value. Fewer than 2^31 pixels on either side.
//
//   pass             rows of the product     columns   summed over                  right matrix
//   forward          pixels of y             o         (u, v, c)                    conv_filter_rows' [o, k k c]
//   backward_input   pixels of x             c         (u, v, o)                    conv_input_weight's [c, k k o]
//   backward_weight  o                       (u, v, c) pixels of y, cut in splits   patches of x
//
// conv_filter_rows(w, rows, c, channels, taps, shift): w [o, c, taps] as rows [o, taps, channels], zeros past c: what
//   forward reads, and cuDNN. conv_filter_back(rows, dw, c, channels, taps, shift): the other way, without what is past c.
//   run = 2^shift channels pass through shared memory at a time. grid (ceil(channels / run), o), block 256, dynamic
//   shared bytes run taps sizeof(T).
// conv_input_weight(w, rows, shape): w in the order that backward_input reads. grid ceil(o c k k / 256), block 256.
// conv_add_bias(y, bias, rows, o, piece): y += bias, for products that are not ours. Columns of lanes.cuh.
// conv_forward(x, rows, bias, y, shape), conv_backward_input(dy, rows, dx, shape): one block per tile, f32 64 x 64,
//   bf16 128 x 64 if there are at most 64 columns, else 128 x 128. grid ceil(rows / tile height)
//   ceil(columns / tile width), block 256, dynamic shared bytes 0 for f32, (128 + tile width) 240 for bf16, for
//   which the launcher raises the function's limit to 61440.
// conv_backward_weight(x, dy, partial, shape, share): partial: f32 [splits, o, k k c], split i sums pixels i share ..;
//   share is a multiple of 32, splits = ceil(pixels of y / share) <= 65535. Tiles are f32 64 x 64, bf16 64 x 128 over
//   o x (u, v, c). grid (ceil(k k c / tile width), ceil(o / 64), splits), block 256.
// conv_weight_total(partial, dw, splits, shape): the sum of the splits, in an order that their number fixes.
//   block (256 / y, y) with y a power of two up to 8, the more the more splits there are; grid ceil(o c k k / (256 / y)).
//
// f32 runs on the CUDA cores, bf16 on the tensor cores (mma.sync, sm_80 and later) with f32 sums. Channels move 16
// bytes at a time where they divide by 4 (f32) or 8 (bf16), otherwise one by one: pad_channels is worth its copy.

struct Shape {
    int batch, h, w, c, oh, ow, o, kernel, stride, padding;
};

// ---- which element of an image a product reads ----

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
        return {static_cast<i64>(at.n) * s.h * s.w * s.c, at.i * s.stride - s.padding, at.j * s.stride - s.padding};
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
        return {static_cast<i64>(n) * s.oh * s.ow * s.o, static_cast<int>(row - n * s.h) + s.padding,
                static_cast<int>(at - row * s.w) + s.padding};
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

// ---- f32: a 64 x 64 tile, 4 x 4 sums per thread, 16 terms at a time, the next 16 on their way in registers ----

struct Tile32 {
    enum : int { M = 64, N = 64, K = 16 };
    float a[2][K][M + 4], b[2][K][N + 4];
};

DEVICE void multiply(const Tile32& tile, int stage, float (&sum)[4][4]) {
    const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
#pragma unroll
    for (int k = 0; k < Tile32::K; ++k) {
        float a[4], b[4];
        load(&tile.a[stage][k][m], a);
        load(&tile.b[stage][k][n], b);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] += a[i] * b[j];
    }
}

// Each thread's pack of a tile that is read along its terms, stored across them.
DEVICE void put_transposed(float (&to)[Tile32::K][Tile32::M + 4], const Pack<float>& pack) {
#pragma unroll
    for (int k = 0; k < 4; ++k) to[threadIdx.x % 4 * 4 + k][threadIdx.x / 4] = pack.v[k];
}

template <class Patches>
DEVICE void product(const Patches patches, const float* weight, const float* bias, float* y) {
    __shared__ Tile32 tile;
    const int columns = patches.columns(), window = patches.s.kernel * patches.s.kernel * patches.channels();
    const int across = (columns + Tile32::N - 1) / Tile32::N;
    const int m0 = blockIdx.x / across * Tile32::M, n0 = blockIdx.x % across * Tile32::N;
    const bool vector = patches.channels() % 4 == 0;
    const Pixel pixel = patches.pixel(m0 + threadIdx.x / 4);
    const int own = n0 + threadIdx.x / 4, slot = threadIdx.x % 4 * 4;
    Tap next = tap(slot, patches.channels(), patches.s.kernel);
    // The next K terms of this thread's pixel.
    const auto patch = [&]() {
        const Pack<float> pack = collect<4, float>(vector, [&](int k) {
            return patches.find(pixel, further(next, k, patches.channels(), patches.s.kernel));
        });
        advance(next, Tile32::K, patches.channels(), patches.s.kernel);
        return pack;
    };
    const auto weights = [&](int k0) {
        return collect<4, float>(vector, [&](int k) { return element(weight, own, columns, k0 + slot + k, window); });
    };
    float sum[4][4] = {};
    put_transposed(tile.a[0], patch());
    put_transposed(tile.b[0], weights(0));
    __syncthreads();
    int stage = 0;
    for (int k0 = 0; k0 < window; k0 += Tile32::K, stage ^= 1) {
        const bool more = k0 + Tile32::K < window;
        Pack<float> a, b;
        if (more) a = patch(), b = weights(k0 + Tile32::K);
        multiply(tile, stage, sum);
        if (more) put_transposed(tile.a[stage ^ 1], a), put_transposed(tile.b[stage ^ 1], b);
        __syncthreads();
    }
    const int n = n0 + threadIdx.x % 16 * 4;
    for (int i = 0; i < 4; ++i) {
        const int m = m0 + threadIdx.x / 16 * 4 + i;
        for (int j = 0; j < 4; ++j)
            if (m < patches.rows() && n + j < columns)
                y[static_cast<i64>(m) * columns + n + j] = sum[i][j] + (bias ? bias[n + j] : 0.0f);
    }
}

DEVICE void weight_product(const Forward<float> patches, const float* dy, float* partial, int first, int end) {
    __shared__ Tile32 tile;
    const Shape& s = patches.s;
    const int window = s.kernel * s.kernel * s.c;
    const int m0 = blockIdx.y * Tile32::M, n0 = blockIdx.x * Tile32::N;
    const int row = threadIdx.x / 16, slot = threadIdx.x % 16 * 4;
    const bool vector = s.c % 4 == 0, vector_dy = s.o % 4 == 0;
    const auto gradient = [&](int k0) {
        const int pixel = k0 + row < end ? k0 + row : patches.rows();
        return collect<4, float>(vector_dy, [&](int k) { return element(dy, pixel, patches.rows(), m0 + slot + k, s.o); });
    };
    const Tap taps[4] = {tap(n0 + slot, s.c, s.kernel), tap(n0 + slot + 1, s.c, s.kernel),
                         tap(n0 + slot + 2, s.c, s.kernel), tap(n0 + slot + 3, s.c, s.kernel)};
    Forward<float>::Walk walk = patches.start(first + row);
    // Called for one k0 after the other.
    const auto patch = [&](int k0) {
        const Pixel pixel = k0 + row < end ? patches.pixel(walk) : Pixel{-1, 0, 0};
        patches.advance(walk, Tile32::K);
        return collect<4, float>(vector, [&](int k) { return patches.find(pixel, taps[k]); });
    };
    float sum[4][4] = {};
    store_pack(&tile.a[0][row][slot], gradient(first));
    store_pack(&tile.b[0][row][slot], patch(first));
    __syncthreads();
    int stage = 0;
    for (int k0 = first; k0 < end; k0 += Tile32::K, stage ^= 1) {
        const bool more = k0 + Tile32::K < end;
        Pack<float> a, b;
        if (more) a = gradient(k0 + Tile32::K), b = patch(k0 + Tile32::K);
        multiply(tile, stage, sum);
        if (more) store_pack(&tile.a[stage ^ 1][row][slot], a), store_pack(&tile.b[stage ^ 1][row][slot], b);
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i) {
        const int m = m0 + row * 4 + i;
        for (int j = 0; j < 4; ++j)
            if (m < s.o && n0 + slot + j < window) partial[static_cast<i64>(m) * window + n0 + slot + j] = sum[i][j];
    }
}

// ---- bf16: tensor cores, 8 warps of 32 or 64 x 32 sums each, 32 terms at a time, STAGES tiles on their way ----

enum : int { STAGES = 3, TERMS = 32 };

DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// Copies 16 bytes to shared memory without waiting; zeros where `from` is null.
DEVICE void copy_async(bf16* to, const bf16* from, const bf16* somewhere) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from ? from : somewhere), "r"(from ? 16 : 0)
                 : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last `pending` groups of copies are there.
template <int pending>
DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// What find(0) .. find(7) point to, into shared memory; `to` is aligned to 16 bytes.
template <class Find>
DEVICE void fetch(bf16* to, const bf16* somewhere, bool vector, Find find) {
    if (vector)
        copy_async(to, find(0), somewhere);
    else
        store_pack(to, collect<8, bf16>(false, find));
}

// Four 8 x 8 matrices, of which each lane names a row; where TRANSPOSED, each is turned over on the way.
template <bool TRANSPOSED>
DEVICE void load_matrices(u32 (&to)[4], const bf16* row) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_address(row))
                     : "memory");
}

// sum [16 x 8] += a [16 x 16] b [16 x 8].
DEVICE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The sums of a warp: I tiles of 16 rows by four of 8 columns.
template <int I>
struct Sums {
    float of[I][4][4] = {};

    // a(i, k), b(j, k): a lane's row of the four matrices at rows 16 i (columns 16 j), terms k ..
    template <bool TRANSPOSED, class A, class B>
    DEVICE void add(A a, B b) {
#pragma unroll
        for (int k = 0; k < TERMS; k += 16) {
            u32 left[I][4], right[2][4];
#pragma unroll
            for (int i = 0; i < I; ++i) load_matrices<TRANSPOSED>(left[i], a(i, k));
#pragma unroll
            for (int j = 0; j < 2; ++j) load_matrices<TRANSPOSED>(right[j], b(j, k));
#pragma unroll
            for (int i = 0; i < I; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) multiply(of[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
        }
    }

    // body(row, column, value, value of the next column) for this lane's pairs.
    template <class Body>
    DEVICE void each(Body body) const {
#pragma unroll
        for (int i = 0; i < I; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    body(i * 16 + half * 8 + static_cast<int>(lane()) / 4, j * 8 + static_cast<int>(lane()) % 4 * 2,
                         of[i][j][half * 2], of[i][j][half * 2 + 1]);
    }
};

// Runs fetch_stage(stage, k0) ahead of compute(stage) over the terms first .. end.
template <class Fetch, class Compute>
DEVICE void pipeline(int first, int end, Fetch fetch_stage, Compute compute) {
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
        if (first + ahead * TERMS < end) fetch_stage(ahead, first + ahead * TERMS);
        commit_copies();
    }
    int stage = 0;
    for (int k0 = first; k0 < end; k0 += TERMS) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        const int next = k0 + (STAGES - 1) * TERMS;
        if (next < end) fetch_stage(stage == 0 ? STAGES - 1 : stage - 1, next);
        commit_copies();
        compute(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

// A tile of 128 x N; the warps stand 256 / N by N / 32 over it.
template <int N, class Patches>
DEVICE void product_tile(const Patches& patches, const bf16* weight, const bf16* bias, bf16* y) {
    enum : int { M = 128, PITCH = TERMS + 8, ROWS = N / 2, ACROSS = N / 32 };
    extern __shared__ uint4 shared[];
    typedef bf16 Rows[PITCH];
    Rows* const a = reinterpret_cast<Rows*>(shared);
    Rows* const b = a + STAGES * M;
    const int columns = patches.columns(), channels = patches.channels(), kernel = patches.s.kernel;
    const int window = kernel * kernel * channels;
    const int across = (columns + N - 1) / N;
    const int m0 = blockIdx.x / across * M, n0 = blockIdx.x % across * N;
    const bool vector = channels % 8 == 0;
    const int row = threadIdx.x / 4, slot = threadIdx.x % 4 * 8;
    const Pixel pixels[2] = {patches.pixel(m0 + row), patches.pixel(m0 + row + 64)};
    const int warp_m = warp_in_block() / ACROSS * ROWS, warp_n = warp_in_block() % ACROSS * 32;
    const int l = lane();
    Tap next = tap(slot, channels, kernel);

    Sums<ROWS / 16> sums;
    pipeline(
        0, window,
        [&](int stage, int k0) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                fetch(&a[stage * M + row + 64 * i][slot], patches.x, vector, [&](int k) {
                    return patches.find(pixels[i], further(next, k, channels, kernel));
                });
            advance(next, TERMS, channels, kernel);
#pragma unroll
            for (int i = 0; i < N / 64; ++i)
                fetch(&b[stage * N + row + 64 * i][slot], weight, vector,
                      [&](int k) { return element(weight, n0 + row + 64 * i, columns, k0 + slot + k, window); });
        },
        [&](int stage) {
            sums.template add<false>(
                [&](int i, int k) { return &a[stage * M + warp_m + i * 16 + l % 16][k + l / 16 * 8]; },
                [&](int j, int k) { return &b[stage * N + warp_n + j * 16 + l / 16 * 8 + l % 8][k + l / 8 % 2 * 8]; });
        });
    sums.each([&](int i, int j, float low, float high) {
        const int m = m0 + warp_m + i, n = n0 + warp_n + j;
        if (m >= patches.rows() || n >= columns) return;
        bf16* const to = y + static_cast<i64>(m) * columns + n;
        if (bias) low += to_f32(bias[n]);
        if (bias && n + 1 < columns) high += to_f32(bias[n + 1]);
        if (columns % 2 == 0) {
            *reinterpret_cast<u32*>(to) = f32_to_bf16x2(low, high);
        } else {
            to[0] = from_f32<bf16>(low);
            if (n + 1 < columns) to[1] = from_f32<bf16>(high);
        }
    });
}

template <class Patches>
DEVICE void product(const Patches patches, const bf16* weight, const bf16* bias, bf16* y) {
    if (patches.columns() <= 64)
        product_tile<64>(patches, weight, bias, y);
    else
        product_tile<128>(patches, weight, bias, y);
}

DEVICE void weight_product(const Forward<bf16> patches, const bf16* dy, float* partial, int first, int end) {
    enum : int { M = 64, N = 128 };
    __shared__ alignas(16) bf16 a[STAGES][TERMS][M + 8];
    __shared__ alignas(16) bf16 b[STAGES][TERMS][N + 8];
    const Shape& s = patches.s;
    const int window = s.kernel * s.kernel * s.c;
    const int m0 = blockIdx.y * M, n0 = blockIdx.x * N;
    const bool vector = s.c % 8 == 0, vector_dy = s.o % 8 == 0;
    const int warp_m = warp_in_block() / 4 * 32, warp_n = warp_in_block() % 4 * 32;
    const int l = lane();
    const int row_a = threadIdx.x / 8, slot_a = threadIdx.x % 8 * 8;
    const int row_b = threadIdx.x / 16, slot_b = threadIdx.x % 16 * 8;
    const Tap first_tap = tap(n0 + slot_b, s.c, s.kernel);
    Forward<bf16>::Walk walks[2] = {patches.start(first + row_b), patches.start(first + row_b + 16)};

    Sums<2> sums;
    pipeline(
        first, end,
        [&](int stage, int k0) {
            const int pixel = k0 + row_a < end ? k0 + row_a : patches.rows();
            fetch(&a[stage][row_a][slot_a], dy, vector_dy,
                  [&](int k) { return element(dy, pixel, patches.rows(), m0 + slot_a + k, s.o); });
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Pixel pixel = k0 + row_b + 16 * i < end ? patches.pixel(walks[i]) : Pixel{-1, 0, 0};
                patches.advance(walks[i], TERMS);
                fetch(&b[stage][row_b + 16 * i][slot_b], patches.x, vector, [&](int k) {
                    return patches.find(pixel, further(first_tap, k, s.c, s.kernel));
                });
            }
        },
        [&](int stage) {
            sums.add<true>(
                [&](int i, int k) { return &a[stage][k + l / 16 * 8 + l % 8][warp_m + i * 16 + l / 8 % 2 * 8]; },
                [&](int j, int k) { return &b[stage][k + l / 8 % 2 * 8 + l % 8][warp_n + j * 16 + l / 16 * 8]; });
        });
    sums.each([&](int i, int j, float low, float high) {
        const int m = m0 + warp_m + i, n = n0 + warp_n + j;
        if (m >= s.o) return;
        float* const to = partial + static_cast<i64>(m) * window + n;
        if (n < window) to[0] = low;
        if (n + 1 < window) to[1] = high;
    });
}

// ---- kernels ----

// Where a block of a filter's move stands: `count` channels from `first` on, `kept` of which the weight has. Element
// (channel, tap) of the weight is in shared memory at channel taps + tap, so both sides go to memory in order.
struct Slice {
    const int first, count, kept;

    DEVICE Slice(int c, int channels, int run)
        : first(blockIdx.x * run), count(min(run, channels - first)), kept(max(0, min(run, c - first))) {}

    DEVICE static int min(int a, int b) { return a < b ? a : b; }
    DEVICE static int max(int a, int b) { return a > b ? a : b; }
};

KERNEL(256) conv_filter_rows(const T* __restrict__ w, T* __restrict__ rows, int c, int channels, int taps, int shift) {
    extern __shared__ uint4 shared[];
    T* const slice = reinterpret_cast<T*>(shared);
    const int run = 1 << shift;
    const Slice at(c, channels, run);
    const T* const from = w + (static_cast<i64>(blockIdx.y) * c + at.first) * taps;
    T* const to = rows + static_cast<i64>(blockIdx.y) * taps * channels + at.first;
    for (int i = threadIdx.x; i < run * taps; i += THREADS) slice[i] = i < at.kept * taps ? from[i] : from_f32<T>(0.0f);
    __syncthreads();
    for (int i = threadIdx.x; i < run * taps; i += THREADS) {
        const int tap = i >> shift, channel = i & (run - 1);
        if (channel < at.count) to[static_cast<i64>(tap) * channels + channel] = slice[channel * taps + tap];
    }
}

KERNEL(256) conv_filter_back(const T* __restrict__ rows, T* __restrict__ dw, int c, int channels, int taps, int shift) {
    extern __shared__ uint4 shared[];
    T* const slice = reinterpret_cast<T*>(shared);
    const int run = 1 << shift;
    const Slice at(c, channels, run);
    const T* const from = rows + static_cast<i64>(blockIdx.y) * taps * channels + at.first;
    T* const to = dw + (static_cast<i64>(blockIdx.y) * c + at.first) * taps;
    for (int i = threadIdx.x; i < run * taps; i += THREADS) {
        const int tap = i >> shift, channel = i & (run - 1);
        if (channel < at.count) slice[channel * taps + tap] = from[static_cast<i64>(tap) * channels + channel];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < at.kept * taps; i += THREADS) to[i] = slice[i];
}

template <int N>
DEVICE void add_bias(T* y, const T* bias, i64 rows, i64 o, i64 piece) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    const i64 end = (blockIdx.y + 1) * piece < rows ? (blockIdx.y + 1) * piece : rows;
    if (column >= o) return;
    float b[N];
    load(bias + column, b);
#pragma unroll 4
    for (i64 row = blockIdx.y * piece + threadIdx.y; row < end; row += blockDim.y) {
        float v[N];
        load(y + row * o + column, v);
        for (int k = 0; k < N; ++k) v[k] += b[k];
        store(y + row * o + column, v);
    }
}

KERNEL(256) conv_add_bias(T* y, const T* bias, i64 rows, i64 o, i64 piece) {
    if (o % LANES == 0)
        add_bias<LANES>(y, bias, rows, o, piece);
    else
        add_bias<1>(y, bias, rows, o, piece);
}

KERNEL(256) conv_input_weight(const T* w, T* rows, Shape s) {
    const i64 i = thread_in_grid();
    const int area = s.kernel * s.kernel;
    if (i >= static_cast<i64>(s.o) * s.c * area) return;
    const i64 c = i / (area * s.o), o = i % s.o;
    const int uv = i / s.o % area;
    rows[i] = w[(o * s.c + c) * area + uv];
}

// Two blocks on a multiprocessor.
#define PAIRED extern "C" __global__ void __launch_bounds__(256, 2)

PAIRED conv_forward(const T* x, const T* rows, const T* bias, T* y, Shape s) {
    product(Forward<T>{x, s}, rows, bias, y);
}

PAIRED conv_backward_input(const T* dy, const T* rows, T* dx, Shape s) {
    product(Backward<T>{dy, s}, rows, static_cast<const T*>(nullptr), dx);
}

KERNEL(256) conv_backward_weight(const T* x, const T* dy, float* partial, Shape s, int share) {
    const i64 pixels = static_cast<i64>(s.batch) * s.oh * s.ow, first = static_cast<i64>(blockIdx.z) * share;
    const i64 end = first + share < pixels ? first + share : pixels;
    partial += static_cast<i64>(blockIdx.z) * s.o * s.kernel * s.kernel * s.c;
    weight_product(Forward<T>{x, s}, dy, partial, static_cast<int>(first), static_cast<int>(end));
}

KERNEL(256) conv_weight_total(const float* partial, T* dw, i64 splits, Shape s) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int area = s.kernel * s.kernel;
    const i64 size = static_cast<i64>(s.o) * s.c * area;
    const float sum = column_total(partial, splits, size, i);
    if (threadIdx.y > 0 || i >= size) return;
    const i64 o = i / (area * s.c);
    const int uv = i / s.c % area, c = i % s.c;
    dw[(o * s.c + c) * area + uv] = from_f32<T>(sum);
}
