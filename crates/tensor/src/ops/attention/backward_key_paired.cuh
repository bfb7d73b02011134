// Backward, the keys' side, for larger heads: two warps share 32 keys, since the sums of dk and dv would not fit in the
// registers of one. The first takes the scores and makes dv of them, the second takes dp and makes dk. The first leaves
// its probabilities in shared memory as a note, in f32 and in the lanes' own order.

#if KEY_PAIRED
// Settings: what they mean stands in attention.cu.
#define KEY_WARPS 8
#define KEY_STACK 2
#define KEY_TILE 32
#define KEY_CHUNK 16
#define KEY_KEEP 1
#define KEY_BLOCKS 1

namespace attention {

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
                           half_word* __restrict__ dkv, const u32* __restrict__ positions, int seq, int heads, int kv_heads) {
    using namespace backward_key;
    extern __shared__ __align__(256) unsigned char memory[];
    const u32 own_tile = shared_address(memory), stages = own_tile + 2 * ROWS * PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = warp % PAIRS;
    const bool second = warp >= PAIRS;
    const Place at = place<ROWS>(seq, heads);
    const int block = at.block * ROWS, head = at.head;
    const int width = heads * HEAD, shared_width = kv_heads * HEAD, stride = width + 2 * shared_width;
    const long long first_token = at.batch * seq;
    const half_word* query = qkv + first_token * stride + head * HEAD;
    const half_word *key = qkv + first_token * stride + width + head / (heads / kv_heads) * HEAD, *value = key + shared_width;
    dy += first_token * width + head * HEAD;
    rows += first_token * heads + static_cast<long long>(head) * seq;

    auto next = [&](u32 stage) { return stage == stages + (RING - 1) * STAGE_BYTES ? stages : stage + STAGE_BYTES; };
    if (positions) positions += first_token;
    const int tiles = tiles_seeing<TILE>(positions, block + ROWS - 1, (min(block + ROWS, seq) - 1) / TILE, (seq + TILE - 1) / TILE, seq);
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
                                if (m * 16 + i * 8 < edge) x[m][n][2 * i + j] = 0.0f;
                    }
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
    const KeyPlace to = key_place(dkv, first_token, head, heads, kv_heads);
    write_rows<STACK>(out, factor, own_rows, to.key + (second ? 0 : width), to.stride, row, seq);
}

}  // namespace attention
#endif
