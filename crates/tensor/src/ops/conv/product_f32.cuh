// The products in f32, on the CUDA cores: a 64 x 64 tile, 4 x 4 sums per thread, 16 terms at a time, the next 16 on their
// way in registers.

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
