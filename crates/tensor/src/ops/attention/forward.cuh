// Forward: a block of queries walks over tiles of keys and values with a running maximum and sum of each row.

// Settings: what they mean stands in attention.cu.
#define FORWARD_WARPS 4
#define FORWARD_STACK 2
#define FORWARD_TILE (HEAD <= 64 ? 64 : 32)
#define FORWARD_CHUNK FORWARD_TILE
#define FORWARD_KEEP (HEAD <= 64)
#define FORWARD_BLOCKS 2

namespace attention {

constexpr float LN_2 = 0.6931471805599453f;
constexpr float SLACK = 8.0f;

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

DEVICE float log2_fast(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

namespace forward {
constexpr int THREADS = FORWARD_WARPS * 32, STACK = FORWARD_STACK, TILE = FORWARD_TILE, CHUNK = FORWARD_CHUNK;
constexpr int OWN = STACK * 16, ROWS = FORWARD_WARPS * OWN;
constexpr int STAGE_BYTES = 2 * TILE * PITCH;  // keys, then values
constexpr int SHARED = ROWS * PITCH + STAGES * STAGE_BYTES;
}  // namespace forward

extern "C" __global__ void __launch_bounds__(forward::THREADS, FORWARD_BLOCKS)
    attention_forward(const half_word* __restrict__ qkv, half_word* __restrict__ y, float* __restrict__ logsumexp,
                      const u32* __restrict__ positions, int seq, int heads, int kv_heads) {
    using namespace forward;
    extern __shared__ __align__(256) unsigned char memory[];
    const u32 own_tile = shared_address(memory), stages = own_tile + ROWS * PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // The last queries see the most keys and go first.
    const Place at = place<ROWS>(seq, heads);
    const int block = ((seq + ROWS - 1) / ROWS - 1 - at.block) * ROWS, head = at.head;
    const int width = heads * HEAD, shared_width = kv_heads * HEAD, stride = width + 2 * shared_width;
    const long long first_token = at.batch * seq;
    const half_word* query = qkv + first_token * stride + head * HEAD;
    const half_word *key = qkv + first_token * stride + width + head / (heads / kv_heads) * HEAD, *value = key + shared_width;

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
    copies_close();
    for (int i = 0; i < STAGES - 1; ++i) fetch(first_tile + i);

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

    // The warp's rows are of documents that begin from here to there.
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
                                if (n * 8 + j < edge) s[m][n][2 * i + j] = minus_infinity();
                    }
            }
            // Tiles come in ascending order, so a row's top is finite once its document has begun.
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
                        const float shrink = top[m][i] == next[m][i] ? 1.0f : exp2_fast((top[m][i] - next[m][i]) * SCALE_2);
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
                    const float shift = top[m][i] == minus_infinity() ? 0.0f : -top[m][i] * SCALE_2;
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

}  // namespace attention
