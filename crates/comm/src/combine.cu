// Elements of several ranks made one, on a card that holds them all.
//
// combine_sum, combine_max(x, y, inputs, outputs, n): each y[i] = ((x0[i] + x1[i]) + x2[i]) + ..; T [n], where T is
//   float, bf16 (summed in f32 and rounded once) or u32 (wraps). A y may be one of the x: a thread reads all ranks'
//   elements before it writes any. grid any, block 256.
// combine_parts(x, parts, y, n): y[i] = ((x[i] + x[n + i]) + x[2 n + i]) + ..; x: T [parts, n], y: T [n], which do not overlap.

#define PLACES 12

struct Places {
    u64 at[PLACES];
    DEVICE T* operator[](u32 rank) const { return reinterpret_cast<T*>(at[rank]); }
};

// Ranks' elements that follow each other.
struct Parts {
    T* first;
    u64 each;
    DEVICE T* operator[](u32 part) const { return first + part * each; }
};

template <class E>
struct Number {
    typedef float Wide;
    DEVICE static float widen(E x) { return to_f32(x); }
    DEVICE static E narrow(float x) { return from_f32<E>(x); }
};
template <>
struct Number<u32> {
    typedef u32 Wide;
    DEVICE static u32 widen(u32 x) { return x; }
    DEVICE static u32 narrow(u32 x) { return x; }
};
typedef Number<T>::Wide Wide;

struct Sum2 {
    DEVICE static Wide join(Wide a, Wide b) { return a + b; }
};
// A NaN of any rank must show.
struct Max2 {
    DEVICE static Wide join(Wide a, Wide b) { return b > a || b != b ? b : a; }
};

template <class Op, class Inputs, class Outputs>
DEVICE void combine(const Inputs& x, const Outputs& y, u32 inputs, u32 outputs, u64 n) {
    constexpr int N = Pack<T>::N;
    u64 low = 0;
    for (u32 r = 0; r < inputs; ++r) low |= reinterpret_cast<u64>(x[r]);
    for (u32 r = 0; r < outputs; ++r) low |= reinterpret_cast<u64>(y[r]);
    const u64 packs = low % 16 == 0 ? n / N : 0;
    for (u64 i = thread_in_grid(); i < packs; i += threads_in_grid()) {
        Wide total[N];
        Pack<T> pack = load_pack(x[0] + i * N);
#pragma unroll
        for (int k = 0; k < N; ++k) total[k] = Number<T>::widen(pack.v[k]);
        for (u32 r = 1; r < inputs; ++r) {
            pack = load_pack(x[r] + i * N);
#pragma unroll
            for (int k = 0; k < N; ++k) total[k] = Op::join(total[k], Number<T>::widen(pack.v[k]));
        }
#pragma unroll
        for (int k = 0; k < N; ++k) pack.v[k] = Number<T>::narrow(total[k]);
        for (u32 r = 0; r < outputs; ++r) store_pack(y[r] + i * N, pack);
    }
    for (u64 i = packs * N + thread_in_grid(); i < n; i += threads_in_grid()) {
        Wide total = Number<T>::widen(x[0][i]);
        for (u32 r = 1; r < inputs; ++r) total = Op::join(total, Number<T>::widen(x[r][i]));
        for (u32 r = 0; r < outputs; ++r) y[r][i] = Number<T>::narrow(total);
    }
}

KERNEL(256) combine_sum(const __grid_constant__ Places x, const __grid_constant__ Places y, u32 inputs, u32 outputs, u64 n) {
    combine<Sum2>(x, y, inputs, outputs, n);
}
KERNEL(256) combine_max(const __grid_constant__ Places x, const __grid_constant__ Places y, u32 inputs, u32 outputs, u64 n) {
    combine<Max2>(x, y, inputs, outputs, n);
}
KERNEL(256) combine_parts(T* x, u32 parts, T* y, u64 n) { combine<Sum2>(Parts{x, n}, Parts{y, 0}, parts, 1, n); }
