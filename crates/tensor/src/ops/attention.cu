// Causal attention on bf16 tensor cores, forward and backward, without the [seq, seq] scores in memory.
//
// It follows FlashAttention-2 (Dao, 2023): a block of queries walks over tiles of keys and values, keeps a
// running maximum and sum of each row (the online softmax of Milakov and Gimelshein, 2018), and the backward
// recomputes the probabilities from the logsumexp. Products are mma.sync m16n8k16 with f32 sums, operands
// come through cp.async into swizzled shared memory and ldmatrix. Compute capability 8.0 or newer; it
// includes nothing, since NVRTC may have no headers. Built once per head size: -DHEAD=64 (32, 64, 80, 96, 128).
//
// Where it departs from the paper:
// - The backward has no atomics, so runs repeat bit for bit. One kernel owns rows of queries and writes dq,
//   the other owns rows of keys and writes dk and dv. Both compute the scores, 7 products instead of 5, but
//   what a product leaves in registers is what the next one wants as its left operand, and dq needs no f32
//   workspace.
// - A row's maximum moves only when it grows by more than 2^SLACK. The softmax does not depend on the
//   reference it is shifted by, and most steps then skip the rescaling of the output.
// - A warp skips each chunk that is above the diagonal of its own rows.
// - Long blocks start first, over teams of heads (see `place`).
//
// Shapes
//   qkv, dqkv: [batch, seq, 3, heads, HEAD] bf16    query, key and value of a token side by side
//   y, dy:     [batch, seq, heads * HEAD]   bf16
//   logsumexp: [batch, heads, seq]          f32     of the scaled scores, natural logarithm
//   rows:      [batch, heads, seq, 2]       f32     workspace of the backward: what the sums of a query's scores
//                                                   and of its dp start from, -logsumexp / scale and -sum(dy * y)
// Pointers are aligned to 16 bytes. seq is any number >= 1.
//
// Launch: grid ceil(seq / rows) * heads * batch (one-dimensional), with rows, threads of a block and bytes of
// dynamic shared memory as `attention_geometry` at the end gives them per kernel, where attention/cuda.rs reads them.
//   attention_forward(qkv, y, logsumexp, seq, heads)
//   attention_backward_query(qkv, y, dy, logsumexp, rows, dqkv, seq, heads)    first: writes rows and dq
//   attention_backward_key(qkv, dy, rows, dqkv, seq, heads)                    then: writes dk and dv
//
// Where the time goes (H200, Nsight Compute): the tensor pipe is busy half of the time, shared memory up to
// 60 %, issue slots 35 %; with two warps a scheduler the rest is latency. Tried and slower: rows padded by 16
// bytes instead of swizzled (copies then straddle lines), mbarriers instead of a block barrier in the pairs'
// ring, the second warp of a pair one chunk behind the first, a third stage, 16 rows a warp.

#ifndef HEAD
#error "the head size is given by -DHEAD"
#endif

// Per kernel: WARPS in a block, STACK of 16-row tiles a warp owns, TILE rows of the other side in a stage of
// shared memory, CHUNK of them a warp takes in one step, KEEP its own operands in registers or read them from
// shared memory each time, BLOCKS that must fit on a multiprocessor.
#define FORWARD_WARPS 4
#define FORWARD_STACK 2
#define FORWARD_TILE (HEAD <= 64 ? 64 : 32)
#define FORWARD_CHUNK FORWARD_TILE
#define FORWARD_KEEP (HEAD <= 64)
#define FORWARD_BLOCKS 2

#define QUERY_WARPS 4
#define QUERY_STACK 2
#define QUERY_TILE (HEAD <= 64 ? 64 : 32)
#define QUERY_CHUNK 32
#define QUERY_KEEP (HEAD <= 64)
#define QUERY_BLOCKS 2

#define KEY_PAIRED (HEAD > 64)
#define KEY_STACK 2
#if KEY_PAIRED
#define KEY_WARPS 8
#define KEY_TILE 32
#define KEY_CHUNK 16
#define KEY_KEEP 1
#define KEY_BLOCKS 1
#else
#define KEY_WARPS 4
#define KEY_TILE 64
#define KEY_CHUNK 32
#define KEY_KEEP 0
#define KEY_BLOCKS 2
#endif

namespace attention {

typedef unsigned short half_word;  // the bits of a bf16
typedef unsigned int u32;

static_assert(HEAD % 16 == 0, "a product takes 16 columns of the head at a time");

constexpr int STEPS = HEAD / 16;  // products along the head
constexpr int PIECES = HEAD / 8;  // 16-byte pieces in a row
constexpr int ROW_BYTES = HEAD * 2;
constexpr int STAGES = 2;   // tiles in shared memory: one in use, one on its way
constexpr int TEAM = 512;   // blocks that start together, see `place`
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float SLACK = 8.0f;

__device__ constexpr double root(double x) {
    double r = x;
    for (int i = 0; i < 32; ++i) r = 0.5 * (r + x / r);
    return r;
}
constexpr float SCALE = static_cast<float>(1.0 / root(HEAD));
// Scores leave the product unscaled; exp2(SCALE_2 * score - ..) is the probability.
constexpr float SCALE_2 = static_cast<float>(1.4426950408889634 / root(HEAD));

// ---- instructions ----

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float log2_fast(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Four 8x8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// sum[16, 8] += left[16, 16] * right[16, 8]
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&left)[4], u32 right0, u32 right1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// 16 bytes to shared memory, or 16 zeros; the source must be readable either way.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_8(u32 to, const void* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(real ? 8 : 0) : "memory");
}

__device__ __forceinline__ void copies_close() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- tiles of shared memory: [rows][HEAD] bf16 ----

// ldmatrix wants the same 16-byte piece of 8 rows in 8 different groups of banks. Where a row is a power of two
// long, its pieces are permuted: piece p of row r lies at p ^ swizzle(r), rows stay aligned (which cp.async
// rewards), and a step along the row is an exclusive or. Elsewhere a row ends on 16 unused bytes.
constexpr bool SWIZZLED = (HEAD & (HEAD - 1)) == 0;
constexpr int PITCH = SWIZZLED ? ROW_BYTES : ROW_BYTES + 16;

__device__ __forceinline__ u32 piece_offset(u32 row, u32 piece) {
    const u32 swizzle = HEAD >= 64 ? row & 7 : (row >> 1) & 3;
    return row * PITCH + ((SWIZZLED ? piece ^ swizzle : piece) << 4);
}

// From a lane's address at column 0 to that at column 16 * step.
__device__ __forceinline__ u32 along(u32 address, int step) { return SWIZZLED ? address ^ (step << 5) : address + (step << 5); }

// Rows first .. first + ROWS of a matrix into a tile; those at limit or beyond become zeros.
template <int ROWS, int THREADS>
__device__ __forceinline__ void copy_tile(u32 tile, const half_word* from, int stride, int first, int limit) {
    constexpr int DOWN = THREADS / PIECES;
    if (THREADS % PIECES == 0 && ROWS % DOWN == 0 && DOWN % 8 == 0 && first + ROWS <= limit) {
        const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
        const half_word* at = from + static_cast<long long>(first + row) * stride + piece * 8;
        const u32 to = tile + piece_offset(row, piece);
#pragma unroll
        for (int i = 0; i < ROWS / DOWN; ++i) copy_16(to + i * DOWN * PITCH, at + static_cast<long long>(i * DOWN) * stride, true);
        return;
    }
#pragma unroll
    for (int i = 0; i < (ROWS * PIECES + THREADS - 1) / THREADS; ++i) {
        const int at = threadIdx.x + i * THREADS;
        if (ROWS * PIECES % THREADS != 0 && at >= ROWS * PIECES) break;
        const int row = at / PIECES, piece = at % PIECES;
        const bool real = first + row < limit;
        copy_16(tile + piece_offset(row, piece), from + static_cast<long long>(real ? first + row : 0) * stride + piece * 8, real);
    }
}

// Where a lane stands in a tile when the warp loads four matrices. `stacked`: lanes walk down 16 rows, then
// step one piece to the right: a left operand, or a right one that is transposed on the way. `abreast`: 8
// rows, one piece to the right, the next 8 rows: a right operand whose rows are its columns.
__device__ __forceinline__ u32 stacked() {
    const u32 lane = threadIdx.x % 32;
    return piece_offset(lane % 16, lane / 16);
}
__device__ __forceinline__ u32 abreast() {
    const u32 lane = threadIdx.x % 32;
    return piece_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// The rows a warp owns, as left operand: in registers, or read from the tile whenever they are wanted.
template <int STACK, bool KEEP>
struct Own;

template <int STACK>
struct Own<STACK, true> {
    u32 kept[STACK][STEPS][4];
    __device__ __forceinline__ void open(u32 rows) {
#pragma unroll
        for (int m = 0; m < STACK; ++m)
#pragma unroll
            for (int k = 0; k < STEPS; ++k) load_matrices(kept[m][k], along(rows + stacked(), k) + m * 16 * PITCH);
    }
    __device__ __forceinline__ void get(u32 (&left)[STACK][4], int k) const {
#pragma unroll
        for (int m = 0; m < STACK; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) left[m][i] = kept[m][k][i];
    }
};

template <int STACK>
struct Own<STACK, false> {
    u32 at;
    __device__ __forceinline__ void open(u32 rows) { at = rows + stacked(); }
    __device__ __forceinline__ void get(u32 (&left)[STACK][4], int k) const {
#pragma unroll
        for (int m = 0; m < STACK; ++m) load_matrices(left[m], along(at, k) + m * 16 * PITCH);
    }
};

// One step along the head of sum[own rows, CHUNK] += own * chunk^T.
template <int STACK, int CHUNK, bool KEEP>
__device__ __forceinline__ void score_step(float (&sum)[STACK][CHUNK / 8][4], const Own<STACK, KEEP>& own, u32 chunk, int k) {
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
__device__ __forceinline__ void gather(float (&sum)[STACK][HEAD / 8][4], const u32 (&weights)[STACK][CHUNK / 16][4], u32 chunk) {
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
__device__ __forceinline__ void beside(float (&score)[STACK][CHUNK / 8][4], const Own<STACK, KEEP>& own, u32 seen, float (&sum)[STACK][HEAD / 8][4],
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
__device__ __forceinline__ void round_weights(u32 (&weights)[STACK][CHUNK / 16][4], const float (&x)[STACK][CHUNK / 8][4]) {
#pragma unroll
    for (int m = 0; m < STACK; ++m)
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                weights[m][k][i] = pack(x[m][2 * k + i / 2][i % 2 * 2], x[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

// A warp's sums, times a factor per row, to its rows of a matrix, by way of its own rows of a tile so that
// each lane writes 16 bytes. factor[m][i] belongs to row m * 16 + i * 8 + lane / 4.
template <int STACK>
__device__ __forceinline__ void write_rows(const float (&sum)[STACK][HEAD / 8][4], const float (&factor)[STACK][2], u32 tile, half_word* to,
                                           int stride, int first, int limit) {
    const u32 lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < STACK; ++m)
#pragma unroll
        for (int n = 0; n < HEAD / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 at = tile + piece_offset(m * 16 + i * 8 + lane / 4, n) + lane % 4 * 4;
                const u32 pair = pack(sum[m][n][2 * i] * factor[m][i], sum[m][n][2 * i + 1] * factor[m][i]);
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair) : "memory");
            }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < STACK * 16 * PIECES / 32; ++i) {
        const int at = lane + i * 32, row = at / PIECES, piece = at % PIECES;
        uint4 eight;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                     : "r"(tile + piece_offset(row, piece))
                     : "memory");
        if (first + row < limit) *reinterpret_cast<uint4*>(to + static_cast<long long>(first + row) * stride + piece * 8) = eight;
    }
}

// Which rows of which head a block works on. Blocks start in the order of their number, so the long ones come
// first over a team of heads: at least TEAM blocks, that the short ones fill the end, and otherwise few enough
// heads that what they read stays in the L2 cache (16 MiB of keys and values) while they read it again.
struct Place {
    int block, head;
    long long batch;
};
template <int ROWS>
__device__ __forceinline__ Place place(int seq, int heads) {
    const int blocks = (seq + ROWS - 1) / ROWS, all = gridDim.x / blocks;
    const int team = max(max((16 << 20) / (seq * ROW_BYTES * 2), TEAM / blocks), 1), teams = max(all / team, 1);
    const long long mine = (static_cast<long long>(blockIdx.x / blocks + 1) * teams - 1) / all;
    const int first = mine * all / teams, size = (mine + 1) * all / teams - first;
    const int within = blockIdx.x - first * blocks, item = first + within % size;
    return {within / size, item % heads, item / heads};
}

// Stages of shared memory are taken in turn.
template <int BYTES>
__device__ __forceinline__ u32 next_stage(u32 stage, u32 first) {
    return stage + BYTES == first + STAGES * BYTES ? first : stage + BYTES;
}

template <int STACK, int WIDTH>
__device__ __forceinline__ void clear(float (&x)[STACK][WIDTH][4]) {
#pragma unroll
    for (int m = 0; m < STACK; ++m)
#pragma unroll
        for (int n = 0; n < WIDTH; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[m][n][i] = 0.0f;
}

// ---- forward ----

namespace forward {
constexpr int THREADS = FORWARD_WARPS * 32, STACK = FORWARD_STACK, TILE = FORWARD_TILE, CHUNK = FORWARD_CHUNK;
constexpr int OWN = STACK * 16, ROWS = FORWARD_WARPS * OWN;
constexpr int STAGE_BYTES = 2 * TILE * PITCH;  // keys, then values
constexpr int SHARED = ROWS * PITCH + STAGES * STAGE_BYTES;
}  // namespace forward

extern "C" __global__ void __launch_bounds__(forward::THREADS, FORWARD_BLOCKS)
    attention_forward(const half_word* __restrict__ qkv, half_word* __restrict__ y, float* __restrict__ logsumexp, int seq, int heads) {
    using namespace forward;
    extern __shared__ __align__(256) unsigned char memory[];
    const u32 own_tile = shared_address(memory), stages = own_tile + ROWS * PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // The last queries see the most keys and go first.
    const Place at = place<ROWS>(seq, heads);
    const int block = ((seq + ROWS - 1) / ROWS - 1 - at.block) * ROWS, head = at.head;
    const int width = heads * HEAD, stride = 3 * width;
    const long long first_token = at.batch * seq;
    const half_word* query = qkv + first_token * stride + head * HEAD;
    const half_word *key = query + width, *value = key + width;

    const int tiles = (min(block + ROWS, seq) + TILE - 1) / TILE;
    u32 filling = stages;
    auto fetch = [&](int tile) {
        if (tile < tiles) {
            copy_tile<TILE, THREADS>(filling, key, stride, tile * TILE, seq);
            copy_tile<TILE, THREADS>(filling + TILE * PITCH, value, stride, tile * TILE, seq);
        }
        copies_close();
        filling = next_stage<STAGE_BYTES>(filling, stages);
    };
    copy_tile<ROWS, THREADS>(own_tile, query, stride, block, seq);
    copies_close();
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);

    const u32 own_rows = own_tile + warp * OWN * PITCH;
    const int row = block + warp * OWN;  // the warp's first
    copies_wait<STAGES - 1>();
    __syncthreads();
    Own<STACK, FORWARD_KEEP> own;
    own.open(own_rows);
    float out[STACK][HEAD / 8][4], top[STACK][2], sum[STACK][2];
    clear(out);
#pragma unroll
    for (int m = 0; m < STACK; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) top[m][i] = minus_infinity(), sum[m][i] = 0.0f;

    u32 stage = stages;
    for (int tile = 0; tile < tiles; ++tile, stage = next_stage<STAGE_BYTES>(stage, stages)) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(tile + STAGES - 1);
        const u32 keys = stage, values = keys + TILE * PITCH;
#pragma unroll 1
        for (int chunk = 0; chunk < TILE; chunk += CHUNK) {
            const int column = tile * TILE + chunk;
            if (column > row + OWN - 1) break;
            float s[STACK][CHUNK / 8][4];
            clear(s);
#pragma unroll
            for (int k = 0; k < STEPS; ++k) score_step<STACK, CHUNK>(s, own, keys + chunk * PITCH + abreast(), k);
            if (column + CHUNK - 1 > row) {
                const int edge = row + lane / 4 - column - lane % 4 * 2;
#pragma unroll
                for (int m = 0; m < STACK; ++m)
#pragma unroll
                    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (n * 8 + i % 2 - m * 16 - i / 2 * 8 > edge) s[m][n][i] = minus_infinity();
            }
            // Tiles come in ascending order, so a row's first chunk holds key 0 and its top is finite after it.
            bool moves = false;
            float next[STACK][2];
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float largest = s[m][0][2 * i];
#pragma unroll
                    for (int n = 0; n < CHUNK / 8; ++n) largest = fmaxf(largest, fmaxf(s[m][n][2 * i], s[m][n][2 * i + 1]));
                    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                    const bool grows = largest > top[m][i] + SLACK / SCALE_2;
                    next[m][i] = grows ? largest : top[m][i];
                    moves |= grows;
                }
            if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
                for (int m = 0; m < STACK; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float shrink = exp2_fast((top[m][i] - next[m][i]) * SCALE_2);
                        top[m][i] = next[m][i];
                        sum[m][i] *= shrink;
#pragma unroll
                        for (int n = 0; n < HEAD / 8; ++n) out[m][n][2 * i] *= shrink, out[m][n][2 * i + 1] *= shrink;
                    }
            }
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float shift = -top[m][i] * SCALE_2;
#pragma unroll
                    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                        for (int j = 2 * i; j < 2 * i + 2; ++j) sum[m][i] += s[m][n][j] = exp2_fast(fmaf(s[m][n][j], SCALE_2, shift));
                }
            u32 weights[STACK][CHUNK / 16][4];
            round_weights<STACK, CHUNK>(weights, s);
            gather<STACK, CHUNK>(out, weights, values + chunk * PITCH + stacked());
        }
    }

    float inverse[STACK][2];
#pragma unroll
    for (int m = 0; m < STACK; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float total = sum[m][i];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            inverse[m][i] = 1.0f / total;
            const int at = row + m * 16 + i * 8 + lane / 4;
            if (lane % 4 == 0 && at < seq)
                logsumexp[first_token * heads + static_cast<long long>(head) * seq + at] = (top[m][i] * SCALE_2 + log2_fast(total)) * LN_2;
        }
    write_rows<STACK>(out, inverse, own_rows, y + first_token * width + head * HEAD, width, row, seq);
}

// ---- backward ----
//
// With p = exp(scale * q k^T - logsumexp), dp = dy v^T and the row sums D = sum(dy * y):
// ds = p * (dp - D), dq = scale * ds k, dk = scale * ds^T q, dv = p^T dy.

namespace backward_query {
constexpr int THREADS = QUERY_WARPS * 32, STACK = QUERY_STACK, TILE = QUERY_TILE, CHUNK = QUERY_CHUNK;
constexpr int OWN = STACK * 16, ROWS = QUERY_WARPS * OWN;
constexpr int STAGE_BYTES = 2 * TILE * PITCH;  // keys, then values
constexpr int SHARED = 2 * ROWS * PITCH + STAGES * STAGE_BYTES;
}  // namespace backward_query

// dy * y summed over one row of the head; the four lanes that own the row share the work.
__device__ __forceinline__ float row_sum(const half_word* y, const half_word* dy) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (PIECES + 3) / 4; ++i) {
        const int piece = threadIdx.x % 4 + i * 4;
        if (PIECES % 4 != 0 && piece >= PIECES) break;
        const uint4 a = *reinterpret_cast<const uint4*>(y + piece * 8), b = *reinterpret_cast<const uint4*>(dy + piece * 8);
        const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sum = fmaf(__uint_as_float(left[j] << 16), __uint_as_float(right[j] << 16), sum);
            sum = fmaf(__uint_as_float(left[j] & 0xffff0000u), __uint_as_float(right[j] & 0xffff0000u), sum);
        }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

extern "C" __global__ void __launch_bounds__(backward_query::THREADS, QUERY_BLOCKS)
    attention_backward_query(const half_word* __restrict__ qkv, const half_word* __restrict__ y, const half_word* __restrict__ dy,
                             const float* __restrict__ logsumexp, float2* __restrict__ rows, half_word* __restrict__ dqkv, int seq, int heads) {
    using namespace backward_query;
    extern __shared__ __align__(256) unsigned char memory[];
    const u32 own_tile = shared_address(memory), stages = own_tile + 2 * ROWS * PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Place at = place<ROWS>(seq, heads);
    const int block = ((seq + ROWS - 1) / ROWS - 1 - at.block) * ROWS, head = at.head;
    const int width = heads * HEAD, stride = 3 * width;
    const long long first_token = at.batch * seq;
    const half_word* query = qkv + first_token * stride + head * HEAD;
    const half_word *key = query + width, *value = key + width;
    y += first_token * width + head * HEAD;
    dy += first_token * width + head * HEAD;
    logsumexp += first_token * heads + static_cast<long long>(head) * seq;
    rows += first_token * heads + static_cast<long long>(head) * seq;

    const int tiles = (min(block + ROWS, seq) + TILE - 1) / TILE;
    u32 filling = stages;
    auto fetch = [&](int tile) {
        if (tile < tiles) {
            copy_tile<TILE, THREADS>(filling, key, stride, tile * TILE, seq);
            copy_tile<TILE, THREADS>(filling + TILE * PITCH, value, stride, tile * TILE, seq);
        }
        copies_close();
        filling = next_stage<STAGE_BYTES>(filling, stages);
    };
    copy_tile<ROWS, THREADS>(own_tile, query, stride, block, seq);
    copy_tile<ROWS, THREADS>(own_tile + ROWS * PITCH, dy, width, block, seq);
    copies_close();
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);

    const u32 own_rows = own_tile + warp * OWN * PITCH;
    const int row = block + warp * OWN;
    float shift[STACK][2], mean[STACK][2];
#pragma unroll
    for (int m = 0; m < STACK; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = row + m * 16 + i * 8 + lane / 4, readable = min(at, seq - 1);
            shift[m][i] = logsumexp[readable] * LOG2_E;
            mean[m][i] = row_sum(y + static_cast<long long>(readable) * width, dy + static_cast<long long>(readable) * width);
            if (lane % 4 == 0 && at < seq) rows[at] = make_float2(-shift[m][i] / SCALE_2, -mean[m][i]);
        }

    copies_wait<STAGES - 1>();
    __syncthreads();
    Own<STACK, QUERY_KEEP> own_query, own_dy;
    own_query.open(own_rows), own_dy.open(own_rows + ROWS * PITCH);
    float out[STACK][HEAD / 8][4];
    clear(out);
    u32 stage = stages;
    for (int tile = 0; tile < tiles; ++tile, stage = next_stage<STAGE_BYTES>(stage, stages)) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(tile + STAGES - 1);
        const u32 keys = stage, values = keys + TILE * PITCH;
#pragma unroll 1
        for (int chunk = 0; chunk < TILE; chunk += CHUNK) {
            const int column = tile * TILE + chunk;
            if (column > row + OWN - 1) break;
            float s[STACK][CHUNK / 8][4], d[STACK][CHUNK / 8][4];
            clear(s);
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) d[m][n][i] = -mean[m][i / 2];
#pragma unroll
            for (int k = 0; k < STEPS; ++k) score_step<STACK, CHUNK>(s, own_query, keys + chunk * PITCH + abreast(), k);
#pragma unroll
            for (int k = 0; k < STEPS; ++k) score_step<STACK, CHUNK>(d, own_dy, values + chunk * PITCH + abreast(), k);
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[m][n][i] = exp2_fast(fmaf(s[m][n][i], SCALE_2, -shift[m][i / 2]));
            if (column + CHUNK - 1 > row) {
                const int edge = row + lane / 4 - column - lane % 4 * 2;
#pragma unroll
                for (int m = 0; m < STACK; ++m)
#pragma unroll
                    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (n * 8 + i % 2 - m * 16 - i / 2 * 8 > edge) s[m][n][i] = 0.0f;
            }
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) d[m][n][i] *= s[m][n][i];
            u32 weights[STACK][CHUNK / 16][4];
            round_weights<STACK, CHUNK>(weights, d);
            gather<STACK, CHUNK>(out, weights, keys + chunk * PITCH + stacked());
        }
    }
    float factor[STACK][2];
#pragma unroll
    for (int m = 0; m < STACK; ++m) factor[m][0] = factor[m][1] = SCALE;
    write_rows<STACK>(out, factor, own_rows, dqkv + first_token * stride + head * HEAD, stride, row, seq);
}

#if !KEY_PAIRED
// Here the roles are turned: a warp owns keys, the tiles are queries and dy, and scores come out transposed.
namespace backward_key {
constexpr int THREADS = KEY_WARPS * 32, STACK = KEY_STACK, TILE = KEY_TILE, CHUNK = KEY_CHUNK;
constexpr int OWN = STACK * 16, ROWS = KEY_WARPS * OWN;
constexpr int STAGE_BYTES = 2 * TILE * PITCH + TILE * 8;  // queries, dy, their two row numbers
constexpr int SHARED = 2 * ROWS * PITCH + STAGES * STAGE_BYTES;
static_assert(TILE * 8 % 256 == 0, "stages stay aligned");
static_assert(TILE <= THREADS, "a thread fetches one row number");
}  // namespace backward_key

extern "C" __global__ void __launch_bounds__(backward_key::THREADS, KEY_BLOCKS)
    attention_backward_key(const half_word* __restrict__ qkv, const half_word* __restrict__ dy, const float2* __restrict__ rows,
                           half_word* __restrict__ dqkv, int seq, int heads) {
    using namespace backward_key;
    extern __shared__ __align__(256) unsigned char memory[];
    const u32 own_tile = shared_address(memory), stages = own_tile + 2 * ROWS * PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // The first keys are seen by the most queries and go first.
    const Place at = place<ROWS>(seq, heads);
    const int block = at.block * ROWS, head = at.head;
    const int width = heads * HEAD, stride = 3 * width;
    const long long first_token = at.batch * seq;
    const half_word* query = qkv + first_token * stride + head * HEAD;
    const half_word *key = query + width, *value = key + width;
    dy += first_token * width + head * HEAD;
    rows += first_token * heads + static_cast<long long>(head) * seq;

    const int first_tile = block / TILE, tiles = (seq + TILE - 1) / TILE;
    u32 filling = stages;
    auto fetch = [&](int tile) {
        if (tile < tiles) {
            copy_tile<TILE, THREADS>(filling, query, stride, tile * TILE, seq);
            copy_tile<TILE, THREADS>(filling + TILE * PITCH, dy, width, tile * TILE, seq);
            if (threadIdx.x < TILE) {
                const int at = tile * TILE + threadIdx.x;
                copy_8(filling + 2 * TILE * PITCH + threadIdx.x * 8, rows + min(at, seq - 1), at < seq);
            }
        }
        copies_close();
        filling = next_stage<STAGE_BYTES>(filling, stages);
    };
    copy_tile<ROWS, THREADS>(own_tile, key, stride, block, seq);
    copy_tile<ROWS, THREADS>(own_tile + ROWS * PITCH, value, stride, block, seq);
    copies_close();
    for (int i = 0; i < STAGES - 1; ++i) fetch(first_tile + i);

    const u32 own_rows = own_tile + warp * OWN * PITCH;
    const int row = block + warp * OWN;
    copies_wait<STAGES - 1>();
    __syncthreads();
    Own<STACK, KEY_KEEP> own_key, own_value;
    own_key.open(own_rows), own_value.open(own_rows + ROWS * PITCH);
    float dk[STACK][HEAD / 8][4], dv[STACK][HEAD / 8][4];
    clear(dk);
    clear(dv);
    u32 stage = stages;
    for (int tile = first_tile; tile < tiles; ++tile, stage = next_stage<STAGE_BYTES>(stage, stages)) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(tile + STAGES - 1);
        const u32 queries = stage, dys = queries + TILE * PITCH;
        const u32 numbers = dys + TILE * PITCH + lane % 4 * 16;
#pragma unroll 1
        for (int chunk = 0; chunk < TILE; chunk += CHUNK) {
            const int column = tile * TILE + chunk;
            if (column + CHUNK - 1 < row) continue;
            float s[STACK][CHUNK / 8][4], d[STACK][CHUNK / 8][4];
#pragma unroll
            for (int n = 0; n < CHUNK / 8; ++n) {
                float shift0, shift1, mean0, mean1;
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(shift0), "=f"(mean0), "=f"(shift1), "=f"(mean1)
                             : "r"(numbers + (chunk + n * 8) * 8)
                             : "memory");
#pragma unroll
                for (int m = 0; m < STACK; ++m) {
                    s[m][n][0] = s[m][n][2] = shift0, s[m][n][1] = s[m][n][3] = shift1;
                    d[m][n][0] = d[m][n][2] = mean0, d[m][n][1] = d[m][n][3] = mean1;
                }
            }
#pragma unroll
            for (int k = 0; k < STEPS; ++k) score_step<STACK, CHUNK>(s, own_key, queries + chunk * PITCH + abreast(), k);
#pragma unroll
            for (int k = 0; k < STEPS; ++k) score_step<STACK, CHUNK>(d, own_value, dys + chunk * PITCH + abreast(), k);
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[m][n][i] = exp2_fast(s[m][n][i] * SCALE_2);
            if (column < row + OWN - 1) {
                const int edge = row + lane / 4 - column - lane % 4 * 2;
#pragma unroll
                for (int m = 0; m < STACK; ++m)
#pragma unroll
                    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (n * 8 + i % 2 - m * 16 - i / 2 * 8 < edge) s[m][n][i] = 0.0f;
            }
            u32 weights[STACK][CHUNK / 16][4];
            round_weights<STACK, CHUNK>(weights, s);
            gather<STACK, CHUNK>(dv, weights, dys + chunk * PITCH + stacked());
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) d[m][n][i] *= s[m][n][i];
            round_weights<STACK, CHUNK>(weights, d);
            gather<STACK, CHUNK>(dk, weights, queries + chunk * PITCH + stacked());
        }
    }
    float factor[STACK][2];
#pragma unroll
    for (int m = 0; m < STACK; ++m) factor[m][0] = factor[m][1] = SCALE;
    half_word* to = dqkv + first_token * stride + head * HEAD;
    write_rows<STACK>(dk, factor, own_rows, to + width, stride, row, seq);
#pragma unroll
    for (int m = 0; m < STACK; ++m) factor[m][0] = factor[m][1] = 1.0f;
    write_rows<STACK>(dv, factor, own_rows + ROWS * PITCH, to + 2 * width, stride, row, seq);
}
#else
// Large heads: two warps share 32 keys, since the sums of dk and dv would not fit in the registers of one. The
// first takes the scores and makes dv of them, the second takes dp and makes dk. The first leaves its
// probabilities in shared memory as a note, in f32 and in the lanes' own order.
namespace backward_key {
constexpr int PAIRS = KEY_WARPS / 2, THREADS = KEY_WARPS * 32, STACK = KEY_STACK, TILE = KEY_TILE, CHUNK = KEY_CHUNK;
constexpr int OWN = STACK * 16, ROWS = PAIRS * OWN, CHUNKS = TILE / CHUNK;
constexpr int STAGE_BYTES = 2 * TILE * PITCH + TILE * 8;  // queries, dy, their two row numbers
constexpr int RING = 3;                                   // stages
constexpr int NOTE_BYTES = OWN * CHUNK * 4;
constexpr int SHARED = 2 * ROWS * PITCH + RING * STAGE_BYTES + PAIRS * CHUNKS * NOTE_BYTES;
static_assert(PAIRS * CHUNKS < 16, "each note has a barrier, and the block");
static_assert(TILE * 8 % 256 == 0, "stages stay aligned");
static_assert(TILE <= THREADS, "a thread fetches one row number");
}  // namespace backward_key

extern "C" __global__ void __launch_bounds__(backward_key::THREADS, KEY_BLOCKS)
    attention_backward_key(const half_word* __restrict__ qkv, const half_word* __restrict__ dy, const float2* __restrict__ rows,
                           half_word* __restrict__ dqkv, int seq, int heads) {
    using namespace backward_key;
    extern __shared__ __align__(256) unsigned char memory[];
    const u32 own_tile = shared_address(memory), stages = own_tile + 2 * ROWS * PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = warp % PAIRS;
    const bool second = warp >= PAIRS;
    const Place at = place<ROWS>(seq, heads);
    const int block = at.block * ROWS, head = at.head;
    const int width = heads * HEAD, stride = 3 * width;
    const long long first_token = at.batch * seq;
    const half_word* query = qkv + first_token * stride + head * HEAD;
    const half_word *key = query + width, *value = key + width;
    dy += first_token * width + head * HEAD;
    rows += first_token * heads + static_cast<long long>(head) * seq;

    auto next = [&](u32 stage) { return stage == stages + (RING - 1) * STAGE_BYTES ? stages : stage + STAGE_BYTES; };
    const int tiles = (seq + TILE - 1) / TILE;
    u32 filling = stages;
    auto fetch = [&](int tile) {
        if (tile < tiles) {
            copy_tile<TILE, THREADS>(filling, query, stride, tile * TILE, seq);
            copy_tile<TILE, THREADS>(filling + TILE * PITCH, dy, width, tile * TILE, seq);
            if (threadIdx.x < TILE) {
                const int token = tile * TILE + threadIdx.x;
                copy_8(filling + 2 * TILE * PITCH + threadIdx.x * 8, rows + min(token, seq - 1), token < seq);
            }
        }
        copies_close();
        filling = next(filling);
    };
    // A tile is in place and the one after it on its way. The tile before may still be in use.
    auto advance = [&](int tile) {
        copies_wait<0>();
        __syncthreads();
        fetch(tile + 1);
    };
    int tile = block / TILE;
    copy_tile<ROWS, THREADS>(own_tile, key, stride, block, seq);
    copy_tile<ROWS, THREADS>(own_tile + ROWS * PITCH, value, stride, block, seq);
    copies_close();
    fetch(tile);
    copies_wait<1>();
    __syncthreads();

    const u32 own_rows = own_tile + (second ? ROWS * PITCH : 0) + pair * OWN * PITCH;
    const int row = block + pair * OWN;
    Own<STACK, KEY_KEEP> own;
    own.open(own_rows);
    float out[STACK][HEAD / 8][4];
    clear(out);
    const u32 notes = stages + RING * STAGE_BYTES + pair * CHUNKS * NOTE_BYTES + lane * 16;
    float x[STACK][CHUNK / 8][4];
    u32 weights[STACK][CHUNK / 16][4];
    const u32 seen = (second ? TILE * PITCH : 0) + abreast(), gathered = (second ? 0 : TILE * PITCH) + stacked();
    // Sums start from the row's number: minus its logsumexp, or minus its sum of dy * y.
    auto open_scores = [&](u32 stage, int chunk) {
        const u32 numbers = stage + 2 * TILE * PITCH + chunk * CHUNK * 8 + (second ? 4 : 0) + lane % 4 * 16;
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n) {
            float number[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(number[i]) : "r"(numbers + n * 64 + i * 8) : "memory");
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[m][n][i] = number[i % 2];
        }
    };
    auto weigh = [&](int chunk) {
        const u32 note = notes + chunk * NOTE_BYTES, barrier = 1 + pair * CHUNKS + chunk;
        if (!second) {
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) x[m][n][i] = exp2_fast(x[m][n][i] * SCALE_2);
            const int column = tile * TILE + chunk * CHUNK;
            if (column < row + OWN - 1) {
                const int edge = row + lane / 4 - column - lane % 4 * 2;
#pragma unroll
                for (int m = 0; m < STACK; ++m)
#pragma unroll
                    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (n * 8 + i % 2 - m * 16 - i / 2 * 8 < edge) x[m][n][i] = 0.0f;
            }
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n)
                    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(note + (m * (CHUNK / 8) + n) * 512), "f"(x[m][n][0]),
                                 "f"(x[m][n][1]), "f"(x[m][n][2]), "f"(x[m][n][3])
                                 : "memory");
            asm volatile("bar.arrive %0, 64;" ::"r"(barrier) : "memory");
        } else {
            asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory");
#pragma unroll
            for (int m = 0; m < STACK; ++m)
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n) {
                    float p[4];
                    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(p[0]), "=f"(p[1]), "=f"(p[2]), "=f"(p[3])
                                 : "r"(note + (m * (CHUNK / 8) + n) * 512)
                                 : "memory");
#pragma unroll
                    for (int i = 0; i < 4; ++i) x[m][n][i] *= p[i];
                }
        }
        round_weights<STACK, CHUNK>(weights, x);
    };

    // Queries before the warp's first key do not see any of its keys. A warp that waits for its first tile comes to
    // the barrier at the same place as those at work: the loop has one, and every warp goes through it as often.
    const int first = row / TILE;
    u32 stage = stages, before = stages;
#pragma unroll 1
    for (;; ++tile, before = stage, stage = next(stage)) {
        if (tile < tiles) advance(tile);
        if (tile > first) {
            // The scores of the next chunk beside this chunk's product: neither waits for the other. After the
            // last tile they are computed from whatever is there and not used.
            open_scores(stage, 0);
            beside<STACK, CHUNK>(x, own, stage + seen, out, weights, before + (CHUNKS - 1) * CHUNK * PITCH + gathered);
        } else if (tile == first && tile < tiles) {
            open_scores(stage, 0);
#pragma unroll
            for (int k = 0; k < STEPS; ++k) score_step<STACK, CHUNK>(x, own, stage + seen, k);
        }
        if (tile >= tiles) break;
        if (tile < first) continue;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            weigh(chunk);
            if (chunk == CHUNKS - 1) break;
            open_scores(stage, chunk + 1);
            beside<STACK, CHUNK>(x, own, stage + (chunk + 1) * CHUNK * PITCH + seen, out, weights, stage + chunk * CHUNK * PITCH + gathered);
        }
    }
    float factor[STACK][2];
#pragma unroll
    for (int m = 0; m < STACK; ++m) factor[m][0] = factor[m][1] = second ? SCALE : 1.0f;
    write_rows<STACK>(out, factor, own_rows, dqkv + first_token * stride + head * HEAD + (second ? 1 : 2) * width, stride, row, seq);
}
#endif

// What the host needs to launch each kernel: rows of a block, threads, bytes of dynamic shared memory.
extern "C" __constant__ int attention_geometry[3][3] = {
    {forward::ROWS, forward::THREADS, forward::SHARED},
    {backward_query::ROWS, backward_query::THREADS, backward_query::SHARED},
    {backward_key::ROWS, backward_key::THREADS, backward_key::SHARED},
};

}  // namespace attention
