// What the kernels of the operations share beyond the prelude, which stands before this file: groups of N
// elements as N floats, and the three ways in which threads stand over data.
//
// 1. Elementwise: block 256, grid ceil(n / TILE). Any alignment, any n.
// 2. Rows [rows, c], a row per warp or block: N = LANES if c divides by it, else 1; groups = c / N.
//    groups <= 128: block (32, 4), grid ceil(rows / 4). Otherwise block (min(512, groups / 4 rounded up to a
//    multiple of 32), 1), grid rows. Each thread keeps up to HELD groups in registers and reads the rest again.
// 3. Columns of [rows, c], summed over pieces of rows: N as above; tx = the smallest power of two that is not
//    below c / N, at most 32. Block (tx, 256 / tx), grid (ceil(c / (tx N)), pieces); pieces <= 65535.
//
// In 2 and 3 tensors start at multiples of 16 bytes, and so do their rows when N > 1. How a sum is cut depends
// on the geometry alone, so a launcher that takes it from the shapes gets the same bits every time.

enum : int { THREADS = 256, TILE = 4096, HELD = 4 };

template <int N>
struct Width {
    static constexpr int value = N;
};

DEVICE bool aligned(const void* at) { return (reinterpret_cast<u64>(at) & 15) == 0; }

// N elements as floats: one access up to 16 bytes, two for eight f32. `at` is aligned to what is accessed;
// loads are from any memory, stores go to device memory.
template <int N, class E>
DEVICE void load(const E* at, float (&x)[N]) {
    if constexpr (N == 1) {
        x[0] = to_f32(*at);
    } else if constexpr (N * sizeof(E) >= 16) {
#pragma unroll
        for (int i = 0; i < N; i += Pack<E>::N) unpack(load_pack(at + i), x + i);
    } else {
        static_assert(N == 4 && sizeof(E) == 2, "a group is 1, 4 or 8 elements");
        const uint2 bits = *reinterpret_cast<const uint2*>(at);
        x[0] = __uint_as_float(bits.x << 16);
        x[1] = __uint_as_float(bits.x & 0xffff0000u);
        x[2] = __uint_as_float(bits.y << 16);
        x[3] = __uint_as_float(bits.y & 0xffff0000u);
    }
}

// One store of 16 bytes to device memory: the assignment of a uint4 is at times cut in four. No "memory" clobber, so
// loads of other elements move ahead of it; what a kernel reads again after storing it lies behind a barrier.
template <class E>
DEVICE void store_16(E* at, const Pack<E>& pack) {
    const uint4 bits = bits_of(pack);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)), "r"(bits.x),
                 "r"(bits.y), "r"(bits.z), "r"(bits.w));
}

template <int N, class E>
DEVICE void store(E* at, const float (&x)[N]) {
    if constexpr (N == 1) {
        *at = from_f32<E>(x[0]);
    } else if constexpr (N * sizeof(E) >= 16) {
#pragma unroll
        for (int i = 0; i < N; i += Pack<E>::N) store_16(at + i, pack<E>(x + i));
    } else {
        static_assert(N == 4 && sizeof(E) == 2, "a group is 1, 4 or 8 elements");
        *reinterpret_cast<uint2*>(at) = make_uint2(f32_to_bf16x2(x[0], x[1]), f32_to_bf16x2(x[2], x[3]));
    }
}

// N elements as they are stored, to be kept in fewer registers than floats take.
template <class E, int N>
struct Raw {
    Pack<E> bits;
    DEVICE void read(const E* at) { bits = load_pack(at); }
    DEVICE void write(E* at) const { store_16(at, bits); }
    DEVICE void write_shared(E* at) const { store_pack(at, bits); }
    DEVICE void get(float (&x)[N]) const { unpack(bits, x); }
    DEVICE void set(const float (&x)[N]) { bits = pack<E>(x); }
};
template <class E>
struct Raw<E, 1> {
    E bits;
    DEVICE void read(const E* at) { bits = *at; }
    DEVICE void write(E* at) const { *at = bits; }
    DEVICE void write_shared(E* at) const { *at = bits; }
    DEVICE void get(float (&x)[1]) const { x[0] = to_f32(bits); }
    DEVICE void set(const float (&x)[1]) { bits = from_f32<E>(x[0]); }
};

// The group size at which the wider of two types fills 16 bytes.
template <class A, class B>
DEVICE constexpr int common_width() {
    return 16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));
}

// ---- 1. elementwise: body(i, Width<N>()) for groups that cover 0 .. n ----

template <int N, class Body>
DEVICE void for_each(i64 n, bool vector, Body body) {
    const i64 first = static_cast<i64>(blockIdx.x) * TILE;
    if (vector && first + TILE <= n) {
#pragma unroll
        for (int k = 0; k < TILE / (THREADS * N); ++k) body(first + (k * THREADS + threadIdx.x) * N, Width<N>());
    } else {
        const i64 end = first + TILE < n ? first + TILE : n;
        for (i64 i = first + threadIdx.x; i < end; i += THREADS) body(i, Width<1>());
    }
}

// ---- 2. rows: body(i, k) for this thread's groups of a row; k < HELD counts those to keep, HELD is the rest ----

DEVICE i64 row_in_grid() { return static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y; }

template <int N, class Body>
DEVICE void for_row(i64 c, Body body) {
    const i64 step = static_cast<i64>(blockDim.x) * N;
    i64 i = static_cast<i64>(threadIdx.x) * N;
#pragma unroll
    for (int k = 0; k < HELD; ++k, i += step)
        if (i < c) body(i, k);
    for (; i < c; i += step) body(i, HELD);
}

DEVICE float row_sum(float x) { return blockDim.x > WARP ? block_sum(x) : warp_sum(x); }

// ---- 3. columns ----

// The sum over threadIdx.y, for the threads with y = 0; all threads of the block call it. blockDim.y is a power
// of two.
template <int N>
DEVICE void sum_over_y(float (&x)[N]) {
    __shared__ float pool[N * THREADS / 2];
    for (u32 half = blockDim.y / 2; half > 0; half /= 2) {
        const u32 at = (threadIdx.y % half) * blockDim.x + threadIdx.x;
        if (threadIdx.y >= half && threadIdx.y < 2 * half)
            for (int i = 0; i < N; ++i) pool[i * (THREADS / 2) + at] = x[i];
        __syncthreads();
        if (threadIdx.y < half)
            for (int i = 0; i < N; ++i) x[i] += pool[i * (THREADS / 2) + at];
        __syncthreads();
    }
}

// The sum of one column of [pieces, width] in block (32, 8), for the threads with y = 0; eight are under way at a time.
DEVICE float column_total(const float* partial, i64 pieces, i64 width, i64 column) {
    constexpr int BATCH = 8;
    float sum[1] = {0.0f};
    for (i64 first = threadIdx.y; first < pieces && column < width; first += BATCH * blockDim.y) {
        float v[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const i64 i = first + u * blockDim.y;
            v[u] = i < pieces ? partial[i * width + column] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < BATCH; ++u) sum[0] += v[u];
    }
    sum_over_y(sum);
    return sum[0];
}

// ---- double ----

DEVICE double warp_sum(double x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

// Over a one-dimensional block; every thread gets it.
DEVICE double block_sum(double x) {
    __shared__ double partial[WARP];
    x = warp_sum(x);
    if (lane() == 0) partial[warp_in_block()] = x;
    __syncthreads();
    x = warp_sum(lane() < blockDim.x / WARP ? partial[lane()] : 0.0);
    __syncthreads();
    return x;
}

#ifdef ELEMENT
enum : int { LANES = Pack<T>::N };

// A layer's weights, which are of type T or, where `wide`, f32.
struct Weights {
    const void* at;
    int wide;

    template <int N>
    DEVICE void get(i64 i, float (&x)[N]) const {
        if (wide)
            load(static_cast<const float*>(at) + i, x);
        else
            load(static_cast<const T*>(at) + i, x);
    }
};
#endif

// Writes one element of a tensor that is f32 or, where `narrow`, bf16.
DEVICE void put(void* out, i64 i, float x, int narrow) {
    if (narrow)
        static_cast<bf16*>(out)[i] = from_f32<bf16>(x);
    else
        static_cast<float*>(out)[i] = x;
}
