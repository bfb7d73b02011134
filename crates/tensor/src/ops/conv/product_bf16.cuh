// The products in bf16, on the tensor cores: 8 warps of 32 or 64 x 32 sums each, 32 terms at a time, STAGES tiles on their
// way.

enum : int { STAGES = 3, TERMS = 32 };

// What find(0) .. find(7) point to, into shared memory, zeros where it is null; `to` is aligned to 16 bytes. `somewhere`
// can be read.
template <class Find>
DEVICE void fetch(bf16* to, const bf16* somewhere, bool vector, Find find) {
    if (vector) {
        const bf16* const from = find(0);
        copy_16(shared_address(to), from ? from : somewhere, from);
    } else {
        store_pack(to, collect<8, bf16>(false, find));
    }
}

template <bool TRANSPOSED>
DEVICE void load_matrices(u32 (&to)[4], const bf16* row) {
    if (TRANSPOSED)
        load_matrices_transposed(to, shared_address(row));
    else
        load_matrices(to, shared_address(row));
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
        copies_close();
    }
    int stage = 0;
    for (int k0 = first; k0 < end; k0 += TERMS) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        const int next = k0 + (STAGES - 1) * TERMS;
        if (next < end) fetch_stage(stage == 0 ? STAGES - 1 : stage - 1, next);
        copies_close();
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
