// What every kernel starts with. It is prepended to each source before NVRTC sees it.
//
// It includes nothing: a machine may have the driver and libnvrtc and no header at all. So the integer
// names, bf16, the 16-byte packs and the reductions are our own. Arithmetic is in f32; a stored element
// becomes one by `to_f32` and goes back by `from_f32<T>`, rounded to nearest, ties to even.
//
// A source that is built once per element type writes `T`; the build defines ELEMENT as float or bf16.
// Everything here repeats: reductions add in an order that only the block's size decides, without atomics.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define DEVICE __device__ __forceinline__
// A kernel keeps its plain name, so that the host finds it. `KERNEL(256) name(args) { .. }` promises that a
// block has at most 256 threads.
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)

#define INFINITY_F __int_as_float(0x7f800000)
constexpr u32 FULL_WARP = 0xffffffffu;
constexpr int WARP = 32;

// ---- bf16: the upper half of an f32 ----

struct alignas(2) bf16 {
    u16 bits;
};

DEVICE float bf16_to_f32(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

DEVICE u16 f32_to_bf16(float x) {
#if __CUDA_ARCH__ >= 800
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>((bits >> 16) | 0x40u);
    return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// Two at once, the first in the lower half: one instruction where the card has it.
DEVICE u32 f32_to_bf16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return static_cast<u32>(f32_to_bf16(low)) | (static_cast<u32>(f32_to_bf16(high)) << 16);
#endif
}

DEVICE float to_f32(float x) { return x; }
DEVICE float to_f32(bf16 x) { return bf16_to_f32(x.bits); }

template <class E>
DEVICE E from_f32(float x);
template <>
DEVICE float from_f32<float>(float x) { return x; }
template <>
DEVICE bf16 from_f32<bf16>(float x) { return bf16{f32_to_bf16(x)}; }

// The value that an element of type E would keep of x.
template <class E>
DEVICE float rounded(float x) { return to_f32(from_f32<E>(x)); }

// ---- packs: 16 bytes, 4 floats or 8 bf16, moved by one instruction ----

template <class E>
struct alignas(16) Pack {
    static constexpr int N = 16 / sizeof(E);
    E v[N];

    DEVICE float get(int i) const { return to_f32(v[i]); }
    DEVICE void set(int i, float x) { v[i] = from_f32<E>(x); }
};

template <class E>
DEVICE Pack<E> pack_bits(uint4 bits) {
    return *reinterpret_cast<const Pack<E>*>(&bits);
}

template <class E>
DEVICE uint4 bits_of(const Pack<E>& pack) {
    return *reinterpret_cast<const uint4*>(&pack);
}

// `at` is aligned to 16 bytes in all four.
template <class E>
DEVICE Pack<E> load_pack(const E* at) { return pack_bits<E>(*reinterpret_cast<const uint4*>(at)); }
template <class E>
DEVICE void store_pack(E* at, const Pack<E>& pack) { *reinterpret_cast<uint4*>(at) = bits_of(pack); }

// For data that is touched once: leaves the caches to what is read again.
template <class E>
DEVICE Pack<E> load_pack_once(const E* at) { return pack_bits<E>(__ldcs(reinterpret_cast<const uint4*>(at))); }
template <class E>
DEVICE void store_pack_once(E* at, const Pack<E>& pack) {
    __stcs(reinterpret_cast<uint4*>(at), bits_of(pack));
}

// A pack as floats and back; bf16 goes in pairs.
DEVICE void unpack(const Pack<float>& pack, float* x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = pack.v[i];
}
DEVICE void unpack(const Pack<bf16>& pack, float* x) {
    const uint4 bits = bits_of(pack);
    const u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(pairs[i] << 16);
        x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

template <class E>
DEVICE Pack<E> pack(const float* x);
template <>
DEVICE Pack<float> pack<float>(const float* x) {
    Pack<float> p;
#pragma unroll
    for (int i = 0; i < 4; ++i) p.v[i] = x[i];
    return p;
}
template <>
DEVICE Pack<bf16> pack<bf16>(const float* x) {
    return pack_bits<bf16>(make_uint4(f32_to_bf16x2(x[0], x[1]), f32_to_bf16x2(x[2], x[3]),
                                      f32_to_bf16x2(x[4], x[5]), f32_to_bf16x2(x[6], x[7])));
}

// ---- where a thread stands in a one-dimensional grid ----

DEVICE u64 thread_in_grid() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE u64 threads_in_grid() { return static_cast<u64>(gridDim.x) * blockDim.x; }
DEVICE u32 lane() { return threadIdx.x % WARP; }
DEVICE u32 warp_in_block() { return threadIdx.x / WARP; }

// ---- the work before and behind, for kernels that are launched early; nothing where the card cannot overlap ----

// From here on, everything that was queued before is done, and can be seen. Every thread that touches what earlier work
// may touch calls it first.
DEVICE void wait_for_work_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel's blocks may begin where this one leaves room. They wait for its end before they read what it writes.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- reductions; every thread of the warp or block takes part and gets the result ----

struct Sum {
    DEVICE static float start() { return 0.0f; }
    DEVICE static float join(float a, float b) { return a + b; }
};
struct Max {
    DEVICE static float start() { return -INFINITY_F; }
    DEVICE static float join(float a, float b) { return fmaxf(a, b); }
};

template <class Op>
DEVICE float warp_reduce(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = Op::join(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}
DEVICE float warp_sum(float x) { return warp_reduce<Sum>(x); }
DEVICE float warp_max(float x) { return warp_reduce<Max>(x); }

// The block is one-dimensional, a multiple of 32 threads. May be called again at once: it ends on a barrier.
template <class Op>
DEVICE float block_reduce(float x) {
    __shared__ float partial[WARP];
    x = warp_reduce<Op>(x);
    if (lane() == 0) partial[warp_in_block()] = x;
    __syncthreads();
    x = lane() < blockDim.x / WARP ? partial[lane()] : Op::start();
    x = warp_reduce<Op>(x);
    __syncthreads();
    return x;
}
DEVICE float block_sum(float x) { return block_reduce<Sum>(x); }
DEVICE float block_max(float x) { return block_reduce<Max>(x); }

#ifdef ELEMENT
typedef ELEMENT T;
#endif
