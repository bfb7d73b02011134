// Products of a warp's own rows with a chunk of the other side, mma.sync m16n8k16 with f32 sums: scores along the head,
// and weighted rows along the chunk.

namespace attention {

__device__ constexpr double root(double x) {
    double r = x;
    for (int i = 0; i < 32; ++i) r = 0.5 * (r + x / r);
    return r;
}
constexpr float SCALE = static_cast<float>(1.0 / root(HEAD));
// Scores leave the product unscaled; exp2(SCALE_2 * score - ..) is the probability.
constexpr float SCALE_2 = static_cast<float>(1.4426950408889634 / root(HEAD));

DEVICE float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// The rows a warp owns, as left operand: in registers, or read from the tile whenever they are wanted.
template <int STACK, bool KEEP>
struct Own;

template <int STACK>
struct Own<STACK, true> {
    u32 kept[STACK][STEPS][4];
    DEVICE void open(u32 rows) {
#pragma unroll
        for (int m = 0; m < STACK; ++m)
#pragma unroll
            for (int k = 0; k < STEPS; ++k) load_matrices(kept[m][k], along(rows + stacked(), k) + m * 16 * PITCH);
    }
    DEVICE void get(u32 (&left)[STACK][4], int k) const {
#pragma unroll
        for (int m = 0; m < STACK; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) left[m][i] = kept[m][k][i];
    }
};

template <int STACK>
struct Own<STACK, false> {
    u32 at;
    DEVICE void open(u32 rows) { at = rows + stacked(); }
    DEVICE void get(u32 (&left)[STACK][4], int k) const {
#pragma unroll
        for (int m = 0; m < STACK; ++m) load_matrices(left[m], along(at, k) + m * 16 * PITCH);
    }
};

// One step along the head of sum[own rows, CHUNK] += own * chunk^T.
template <int STACK, int CHUNK, bool KEEP>
DEVICE void score_step(float (&sum)[STACK][CHUNK / 8][4], const Own<STACK, KEEP>& own, u32 chunk, int k) {
    u32 left[STACK][4];
    own.get(left, k);
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n) {
        u32 right[4];
        load_matrices(right, along(chunk, k) + n * 16 * PITCH);
#pragma unroll
        for (int m = 0; m < STACK; ++m) {
            multiply(sum[m][2 * n], left[m], right[0], right[1]);
            multiply(sum[m][2 * n + 1], left[m], right[2], right[3]);
        }
    }
}

// sum[own rows, HEAD] += weights[own rows, CHUNK] * chunk. The layout in which a product leaves its sums is
// the layout in which the next one wants its left operand, so the weights only get rounded.
template <int STACK, int CHUNK>
DEVICE void gather(float (&sum)[STACK][HEAD / 8][4], const u32 (&weights)[STACK][CHUNK / 16][4], u32 chunk) {
#pragma unroll
    for (int k = 0; k < CHUNK / 16; ++k) {
#pragma unroll
        for (int n = 0; n < STEPS; ++n) {
            u32 right[4];
            load_matrices_transposed(right, along(chunk, n) + k * 16 * PITCH);
#pragma unroll
            for (int m = 0; m < STACK; ++m) {
                multiply(sum[m][2 * n], weights[m][k], right[0], right[1]);
                multiply(sum[m][2 * n + 1], weights[m][k], right[2], right[3]);
            }
        }
    }
}

// Both at once, step by step: the scores of one chunk and the weighted rows of another.
template <int STACK, int CHUNK, bool KEEP>
DEVICE void beside(float (&score)[STACK][CHUNK / 8][4], const Own<STACK, KEEP>& own, u32 seen, float (&sum)[STACK][HEAD / 8][4],
                                       const u32 (&weights)[STACK][CHUNK / 16][4], u32 gathered) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        score_step<STACK, CHUNK>(score, own, seen, step);
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            u32 right[4];
            load_matrices_transposed(right, along(gathered, step) + k * 16 * PITCH);
#pragma unroll
            for (int m = 0; m < STACK; ++m) {
                multiply(sum[m][2 * step], weights[m][k], right[0], right[1]);
                multiply(sum[m][2 * step + 1], weights[m][k], right[2], right[3]);
            }
        }
    }
}

template <int STACK, int CHUNK>
DEVICE void round_weights(u32 (&weights)[STACK][CHUNK / 16][4], const float (&x)[STACK][CHUNK / 8][4]) {
#pragma unroll
    for (int m = 0; m < STACK; ++m)
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                weights[m][k][i] = f32_to_bf16x2(x[m][2 * k + i / 2][i % 2 * 2], x[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

}  // namespace attention
