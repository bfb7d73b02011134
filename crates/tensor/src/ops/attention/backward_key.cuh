// Backward, the keys' side, for heads up to 64: the roles are turned, a warp owns keys, the tiles are queries and dy, and
// scores come out transposed. It writes dk and dv.

// For larger heads there is backward_key_paired.cuh.
#define KEY_PAIRED (HEAD > 64)

#if !KEY_PAIRED
// Settings: what they mean stands in attention.cu.
#define KEY_WARPS 4
#define KEY_STACK 2
#define KEY_TILE 64
#define KEY_CHUNK 32
#define KEY_KEEP 0
#define KEY_BLOCKS 2

namespace attention {

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
                           half_word* __restrict__ dkv, const u32* __restrict__ positions, int seq, int heads, int kv_heads) {
    using namespace backward_key;
    extern __shared__ __align__(256) unsigned char memory[];
    const u32 own_tile = shared_address(memory), stages = own_tile + 2 * ROWS * PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // The first keys are seen by the most queries and go first.
    const Place at = place<ROWS>(seq, heads);
    const int block = at.block * ROWS, head = at.head;
    const int width = heads * HEAD, shared_width = kv_heads * HEAD, stride = width + 2 * shared_width;
    const long long first_token = at.batch * seq;
    const half_word* query = qkv + first_token * stride + head * HEAD;
    const half_word *key = qkv + first_token * stride + width + head / (heads / kv_heads) * HEAD, *value = key + shared_width;
    dy += first_token * width + head * HEAD;
    rows += first_token * heads + static_cast<long long>(head) * seq;

    if (positions) positions += first_token;
    const int first_tile = block / TILE;
    const int tiles = tiles_seeing<TILE>(positions, block + ROWS - 1, (min(block + ROWS, seq) - 1) / TILE, (seq + TILE - 1) / TILE, seq);
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
            // Queries of later documents do not see the keys before these.
            if (positions && document_start(positions, column + CHUNK - 1, seq) > row) {
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int edge = document_start(positions, column + n * 8 + lane % 4 * 2 + j, seq) - row - lane / 4;
#pragma unroll
                        for (int m = 0; m < STACK; ++m)
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                if (m * 16 + i * 8 < edge) s[m][n][2 * i + j] = 0.0f;
                    }
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
    const KeyPlace to = key_place(dkv, first_token, head, heads, kv_heads);
    write_rows<STACK>(dk, factor, own_rows, to.key, to.stride, row, seq);
#pragma unroll
    for (int m = 0; m < STACK; ++m) factor[m][0] = factor[m][1] = 1.0f;
    write_rows<STACK>(dv, factor, own_rows + ROWS * PITCH, to.key + width, to.stride, row, seq);
}

}  // namespace attention
#endif
