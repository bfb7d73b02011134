// Backward, the queries' side: a block owns rows of queries and writes dq, and the two numbers of each row that the keys'
// side starts from.
//
// With p = exp(scale * q k^T - logsumexp), dp = dy v^T and the row sums D = sum(dy * y):
// ds = p * (dp - D), dq = scale * ds k, dk = scale * ds^T q, dv = p^T dy.

// Settings: what they mean stands in attention.cu.
#define QUERY_WARPS 4
#define QUERY_STACK 2
#define QUERY_TILE (HEAD <= 64 ? 64 : 32)
#define QUERY_CHUNK 32
#define QUERY_KEEP (HEAD <= 64)
#define QUERY_BLOCKS 2

namespace attention {

constexpr float LOG2_E = 1.4426950408889634f;

namespace backward_query {
constexpr int THREADS = QUERY_WARPS * 32, STACK = QUERY_STACK, TILE = QUERY_TILE, CHUNK = QUERY_CHUNK;
constexpr int OWN = STACK * 16, ROWS = QUERY_WARPS * OWN;
constexpr int STAGE_BYTES = 2 * TILE * PITCH;  // keys, then values
constexpr int SHARED = 2 * ROWS * PITCH + STAGES * STAGE_BYTES;
}  // namespace backward_query

// dy * y summed over one row of the head; the four lanes that own the row share the work.
DEVICE float row_sum(const half_word* y, const half_word* dy) {
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
                             const float* __restrict__ logsumexp, float2* __restrict__ rows, half_word* __restrict__ dqkv,
                             const u32* __restrict__ positions, int seq, int heads, int kv_heads) {
    using namespace backward_query;
    extern __shared__ __align__(256) unsigned char memory[];
    const u32 own_tile = shared_address(memory), stages = own_tile + 2 * ROWS * PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Place at = place<ROWS>(seq, heads);
    const int block = ((seq + ROWS - 1) / ROWS - 1 - at.block) * ROWS, head = at.head;
    const int width = heads * HEAD, shared_width = kv_heads * HEAD, stride = width + 2 * shared_width;
    const long long first_token = at.batch * seq;
    const half_word* query = qkv + first_token * stride + head * HEAD;
    const half_word *key = qkv + first_token * stride + width + head / (heads / kv_heads) * HEAD, *value = key + shared_width;
    y += first_token * width + head * HEAD;
    dy += first_token * width + head * HEAD;
    logsumexp += first_token * heads + static_cast<long long>(head) * seq;
    rows += first_token * heads + static_cast<long long>(head) * seq;

    if (positions) positions += first_token;
    const int first_tile = document_start(positions, block, seq) / TILE, tiles = (min(block + ROWS, seq) + TILE - 1) / TILE;
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
    for (int i = 0; i < STAGES - 1; ++i) fetch(first_tile + i);

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
    const int first_start = document_start(positions, row, seq), last_start = document_start(positions, row + OWN - 1, seq);
    u32 stage = stages;
    for (int tile = first_tile; tile < tiles; ++tile, stage = next_stage<STAGE_BYTES>(stage, stages)) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(tile + STAGES - 1);
        const u32 keys = stage, values = keys + TILE * PITCH;
#pragma unroll 1
        for (int chunk = 0; chunk < TILE; chunk += CHUNK) {
            const int column = tile * TILE + chunk;
            if (column > row + OWN - 1) break;
            if (column + CHUNK <= first_start) continue;
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
            if (column < last_start) {
#pragma unroll
                for (int m = 0; m < STACK; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int edge = document_start(positions, row + m * 16 + i * 8 + lane / 4, seq) - column - lane % 4 * 2;
#pragma unroll
                        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                            for (int j = 0; j < 2; ++j)
                                if (n * 8 + j < edge) s[m][n][2 * i + j] = 0.0f;
                    }
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

}  // namespace attention
