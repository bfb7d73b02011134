// Tiles of shared memory, [rows][HEAD] bf16: how their rows lie, how they are filled, where a warp's lanes stand in them,
// how a warp's sums leave through them; and which rows a block works on.

#ifndef HEAD
#error "the head size is given by -DHEAD"
#endif

namespace attention {

typedef unsigned short half_word;  // the bits of a bf16

static_assert(HEAD % 16 == 0, "a product takes 16 columns of the head at a time");

constexpr int STEPS = HEAD / 16;  // products along the head
constexpr int PIECES = HEAD / 8;  // 16-byte pieces in a row
constexpr int ROW_BYTES = HEAD * 2;
constexpr int STAGES = 2;   // tiles in shared memory: one in use, one on its way
constexpr int TEAM = 512;   // blocks that start together, see `place`

// ldmatrix wants the same 16-byte piece of 8 rows in 8 different groups of banks. Where a row is a power of two
// long, its pieces are permuted: piece p of row r lies at p ^ swizzle(r), rows stay aligned (which cp.async
// rewards), and a step along the row is an exclusive or. Elsewhere a row ends on 16 unused bytes.
constexpr bool SWIZZLED = (HEAD & (HEAD - 1)) == 0;
constexpr int PITCH = SWIZZLED ? ROW_BYTES : ROW_BYTES + 16;

DEVICE u32 piece_offset(u32 row, u32 piece) {
    const u32 swizzle = HEAD >= 64 ? row & 7 : (row >> 1) & 3;
    return row * PITCH + ((SWIZZLED ? piece ^ swizzle : piece) << 4);
}

// From a lane's address at column 0 to that at column 16 * step.
DEVICE u32 along(u32 address, int step) { return SWIZZLED ? address ^ (step << 5) : address + (step << 5); }

// Rows first .. first + ROWS of a matrix into a tile; those at limit or beyond become zeros.
template <int ROWS, int THREADS>
DEVICE void copy_tile(u32 tile, const half_word* from, int stride, int first, int limit) {
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
DEVICE u32 stacked() {
    const u32 lane = threadIdx.x % 32;
    return piece_offset(lane % 16, lane / 16);
}
DEVICE u32 abreast() {
    const u32 lane = threadIdx.x % 32;
    return piece_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// A warp's sums, times a factor per row, to its rows of a matrix, by way of its own rows of a tile so that
// each lane writes 16 bytes. factor[m][i] belongs to row m * 16 + i * 8 + lane / 4.
template <int STACK>
DEVICE void write_rows(const float (&sum)[STACK][HEAD / 8][4], const float (&factor)[STACK][2], u32 tile, half_word* to,
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
                const u32 pair = f32_to_bf16x2(sum[m][n][2 * i] * factor[m][i], sum[m][n][2 * i + 1] * factor[m][i]);
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
DEVICE Place place(int seq, int heads) {
    const int blocks = (seq + ROWS - 1) / ROWS, all = gridDim.x / blocks;
    const int team = max(max((16 << 20) / (seq * ROW_BYTES * 2), TEAM / blocks), 1), teams = max(all / team, 1);
    const long long mine = (static_cast<long long>(blockIdx.x / blocks + 1) * teams - 1) / all;
    const int first = mine * all / teams, size = (mine + 1) * all / teams - first;
    const int within = blockIdx.x - first * blocks, item = first + within % size;
    return {within / size, item % heads, item / heads};
}

// Where the keys' gradient of a head of queries goes, that of its values `heads * HEAD` further on: into dqkv, or, where heads of
// queries share keys and values, into a place of its own in [batch, seq, 2, heads, HEAD], over which `attention_sum_groups` sums.
struct KeyPlace {
    half_word* key;
    int stride;
};
DEVICE KeyPlace key_place(half_word* dkv, long long first_token, int head, int heads, int kv_heads) {
    const int width = heads * HEAD, stride = kv_heads == heads ? 3 * width : 2 * width;
    return {dkv + first_token * stride + (kv_heads == heads ? width : 0) + head * HEAD, stride};
}

// Where the document of a token begins, in a sequence of several; `positions` are those of the sequence, or null where it is one.
DEVICE int document_start(const u32* positions, int at, int seq) {
    const int token = min(at, seq - 1);
    return positions ? token - static_cast<int>(__ldg(positions + token)) : 0;
}

// The first tile, from `from` on, whose queries are all of documents that begin behind key `last`. Starts ascend, and the tile of
// `last` itself is before it.
template <int TILE>
DEVICE int tiles_seeing(const u32* positions, int last, int from, int tiles, int seq) {
    if (!positions) return tiles;
    int low = from + 1, high = tiles;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (document_start(positions, middle * TILE, seq) > last)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// Stages of shared memory are taken in turn.
template <int BYTES>
DEVICE u32 next_stage(u32 stage, u32 first) {
    return stage + BYTES == first + STAGES * BYTES ? first : stage + BYTES;
}

template <int STACK, int WIDTH>
DEVICE void clear(float (&x)[STACK][WIDTH][4]) {
#pragma unroll
    for (int m = 0; m < STACK; ++m)
#pragma unroll
        for (int n = 0; n < WIDTH; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[m][n][i] = 0.0f;
}

}  // namespace attention
