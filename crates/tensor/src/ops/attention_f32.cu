// Causal attention in plain f32, forward and backward: the same tiling as attention.cu without tensor cores.
//
// It is there for f32 tensors and as the reference that the bf16 kernels can be held against on the device. A
// block owns 32 rows, a warp four of them, and a lane stands for one row of the other side: its score is a dot
// product along the head, softmax is a shuffle across the warp, and then lanes stand for columns of the head.
// No atomics, fixed order: runs repeat bit for bit. Built once per head size: -DHEAD=64 (any number up to 256).
//
// Shapes (f32 throughout)
//   qkv, dqkv: [batch, seq, heads + 2 kv_heads, HEAD]
//   y, dy:     [batch, seq, heads * HEAD]
//   logsumexp: [batch, heads, seq]       of the scaled scores, natural logarithm
//   rows:      [batch, heads, seq, 2]    workspace of the backward: logsumexp, sum of dy * y over the head
// Launch: grid ceil(seq / 32) * heads * batch, block 256 threads, dynamic shared memory of
// 3 (forward) or 4 (backward) tiles of 32 * (HEAD + 1) * 4 bytes. The arguments are those of attention.cu.

#ifndef HEAD
#error "the head size is given by -DHEAD"
#endif

namespace attention_f32 {

static_assert(HEAD >= 1 && HEAD <= 256, "a lane holds eight columns of the head, and four tiles fit shared memory");

constexpr int SIDE = 32, THREADS = 256, MINE = SIDE / (THREADS / 32);  // rows of a block; rows of a warp
constexpr int PITCH = HEAD + 1;        // lanes walk down rows: an odd pitch keeps them in different banks
constexpr int COLUMNS = (HEAD + 31) / 32;                              // of the head, per lane
constexpr int TILE = SIDE * PITCH;
constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ float scale() { return 1.0f / sqrtf(static_cast<float>(HEAD)); }

__device__ __forceinline__ void copy_tile(float* tile, const float* from, long long stride, int first, int limit) {
    for (int at = threadIdx.x; at < SIDE * HEAD; at += THREADS) {
        const int row = at / HEAD, column = at % HEAD;
        tile[row * PITCH + column] = first + row < limit ? from[(first + row) * stride + column] : 0.0f;
    }
}

// Row `lane` of a tile against each of the warp's rows of another.
__device__ __forceinline__ void dots(float (&sum)[MINE], const float* own, const float* other) {
    const float* mine = other + threadIdx.x % 32 * PITCH;
    for (int m = 0; m < MINE; ++m) sum[m] = 0.0f;
    for (int d = 0; d < HEAD; ++d) {
        const float x = mine[d];
#pragma unroll
        for (int m = 0; m < MINE; ++m) sum[m] = fmaf(own[m * PITCH + d], x, sum[m]);
    }
}

// sum[m][column] += over the 32 rows of a tile, the weight that lane `row` holds times the row.
__device__ __forceinline__ void gather(float (&sum)[MINE][COLUMNS], const float (&weight)[MINE], const float* tile) {
    for (int row = 0; row < SIDE; ++row) {
        float x[COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int column = threadIdx.x % 32 + 32 * j;
            x[j] = column < HEAD ? tile[row * PITCH + column] : 0.0f;
        }
#pragma unroll
        for (int m = 0; m < MINE; ++m) {
            const float w = __shfl_sync(ALL, weight[m], row);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) sum[m][j] = fmaf(w, x[j], sum[m][j]);
        }
    }
}

__device__ __forceinline__ void write_rows(const float (&sum)[MINE][COLUMNS], const float (&factor)[MINE], float* to, long long stride, int first, int limit) {
#pragma unroll
    for (int m = 0; m < MINE; ++m)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int column = threadIdx.x % 32 + 32 * j;
            if (column < HEAD && first + m < limit) to[(first + m) * stride + column] = sum[m][j] * factor[m];
        }
}

// Where a block works: its first row, and what belongs to its head.
struct Place {
    int block;
    long long width, shared_width, stride, shared, token, heads_row;  // shared: column of its keys; heads_row: start in [batch, heads, seq]
    int head;
    __device__ __forceinline__ Place(int seq, int heads, int kv_heads, bool last_first) {
        const int blocks = (seq + SIDE - 1) / SIDE, item = blockIdx.x / blocks, at = blockIdx.x % blocks;
        block = (last_first ? blocks - 1 - at : at) * SIDE;
        head = item % heads;
        width = static_cast<long long>(heads) * HEAD, shared_width = static_cast<long long>(kv_heads) * HEAD;
        stride = width + 2 * shared_width, shared = width + head / (heads / kv_heads) * HEAD;
        token = static_cast<long long>(item / heads) * seq;
        heads_row = static_cast<long long>(item) * seq;
    }
};

// As in attention.cu: where the document of a token begins.
__device__ __forceinline__ int document_start(const unsigned* positions, int at, int seq) {
    const int token = min(at, seq - 1);
    return positions ? token - static_cast<int>(positions[token]) : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_forward_f32(const float* __restrict__ qkv, float* __restrict__ y, float* __restrict__ logsumexp,
                                                                           const unsigned* __restrict__ positions, int seq, int heads, int kv_heads) {
    extern __shared__ float tiles[];
    float *queries = tiles, *keys = tiles + TILE, *values = keys + TILE;
    const Place at(seq, heads, kv_heads, true);
    const float *query = qkv + at.token * at.stride + at.head * HEAD, *key = qkv + at.token * at.stride + at.shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = at.block + warp * MINE;
    copy_tile(queries, query, at.stride, at.block, seq);

    float out[MINE][COLUMNS] = {}, top[MINE], total[MINE];
    int start[MINE];
    if (positions) positions += at.token;
    for (int m = 0; m < MINE; ++m) top[m] = __int_as_float(0xff800000), total[m] = 0.0f, start[m] = document_start(positions, row + m, seq);
    for (int first = document_start(positions, at.block, seq) / SIDE * SIDE; first < min(at.block + SIDE, seq); first += SIDE) {
        __syncthreads();
        copy_tile(keys, key, at.stride, first, seq);
        copy_tile(values, key + at.shared_width, at.stride, first, seq);
        __syncthreads();
        float s[MINE];
        dots(s, queries + warp * MINE * PITCH, keys);
#pragma unroll
        for (int m = 0; m < MINE; ++m) {
            s[m] = first + lane <= row + m && first + lane >= start[m] ? s[m] * scale() : __int_as_float(0xff800000);
            float largest = s[m];
            for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, step));
            largest = fmaxf(largest, top[m]);
            // A row whose document has not begun has seen no key.
            const float shrink = top[m] == largest ? 1.0f : expf(top[m] - largest);
            top[m] = largest;
            s[m] = largest == __int_as_float(0xff800000) ? 0.0f : expf(s[m] - largest);
            float sum = s[m];
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
            total[m] = total[m] * shrink + sum;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) out[m][j] *= shrink;
        }
        gather(out, s, values);
    }
    float factor[MINE];
    for (int m = 0; m < MINE; ++m) {
        factor[m] = 1.0f / total[m];
        if (lane == 0 && row + m < seq) logsumexp[at.heads_row + row + m] = top[m] + logf(total[m]);
    }
    write_rows(out, factor, y + at.token * at.width + at.head * HEAD, at.width, row, seq);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_query_f32(const float* __restrict__ qkv, const float* __restrict__ y, const float* __restrict__ dy,
                                                                                  const float* __restrict__ logsumexp, float2* __restrict__ rows, float* __restrict__ dqkv,
                                                                                  const unsigned* __restrict__ positions, int seq, int heads, int kv_heads) {
    extern __shared__ float tiles[];
    float *queries = tiles, *dys = tiles + TILE, *keys = dys + TILE, *values = keys + TILE;
    const Place at(seq, heads, kv_heads, true);
    const float *query = qkv + at.token * at.stride + at.head * HEAD, *key = qkv + at.token * at.stride + at.shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = at.block + warp * MINE;
    y += at.token * at.width + at.head * HEAD;
    dy += at.token * at.width + at.head * HEAD;
    copy_tile(queries, query, at.stride, at.block, seq);
    copy_tile(dys, dy, at.width, at.block, seq);

    float shift[MINE], mean[MINE], out[MINE][COLUMNS] = {};
    int start[MINE];
    if (positions) positions += at.token;
    for (int m = 0; m < MINE; ++m) {
        const int readable = min(row + m, seq - 1);
        start[m] = document_start(positions, row + m, seq);
        shift[m] = logsumexp[at.heads_row + readable];
        float sum = 0.0f;
        for (int d = lane; d < HEAD; d += 32) sum = fmaf(y[readable * at.width + d], dy[readable * at.width + d], sum);
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
        mean[m] = sum;
        if (lane == 0 && row + m < seq) rows[at.heads_row + row + m] = make_float2(shift[m], sum);
    }
    for (int first = document_start(positions, at.block, seq) / SIDE * SIDE; first < min(at.block + SIDE, seq); first += SIDE) {
        __syncthreads();
        copy_tile(keys, key, at.stride, first, seq);
        copy_tile(values, key + at.shared_width, at.stride, first, seq);
        __syncthreads();
        float s[MINE], d[MINE];
        dots(s, queries + warp * MINE * PITCH, keys);
        dots(d, dys + warp * MINE * PITCH, values);
#pragma unroll
        for (int m = 0; m < MINE; ++m) d[m] = first + lane <= row + m && first + lane >= start[m] ? expf(s[m] * scale() - shift[m]) * (d[m] - mean[m]) : 0.0f;
        gather(out, d, keys);
    }
    float factor[MINE];
    for (int m = 0; m < MINE; ++m) factor[m] = scale();
    write_rows(out, factor, dqkv + at.token * at.stride + at.head * HEAD, at.stride, row, seq);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_key_f32(const float* __restrict__ qkv, const float* __restrict__ dy, const float2* __restrict__ rows, float* __restrict__ dkv, const unsigned* __restrict__ positions, int seq, int heads, int kv_heads) {
    extern __shared__ float tiles[];
    float *keys = tiles, *values = tiles + TILE, *queries = values + TILE, *dys = queries + TILE;
    const Place at(seq, heads, kv_heads, false);
    const float *query = qkv + at.token * at.stride + at.head * HEAD, *key = qkv + at.token * at.stride + at.shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = at.block + warp * MINE;
    dy += at.token * at.width + at.head * HEAD;
    copy_tile(keys, key, at.stride, at.block, seq);
    copy_tile(values, key + at.shared_width, at.stride, at.block, seq);

    float dk[MINE][COLUMNS] = {}, dv[MINE][COLUMNS] = {};
    if (positions) positions += at.token;
    for (int first = at.block; first < seq; first += SIDE) {
        // Queries from here on are of documents behind these keys.
        if (document_start(positions, first, seq) > at.block + SIDE - 1) break;
        const int start = document_start(positions, first + lane, seq);
        __syncthreads();
        copy_tile(queries, query, at.stride, first, seq);
        copy_tile(dys, dy, at.width, first, seq);
        __syncthreads();
        const float2 number = rows[at.heads_row + min(first + lane, seq - 1)];
        float s[MINE], d[MINE];
        dots(s, keys + warp * MINE * PITCH, queries);
        dots(d, values + warp * MINE * PITCH, dys);
#pragma unroll
        for (int m = 0; m < MINE; ++m) {
            s[m] = row + m <= first + lane && row + m >= start && first + lane < seq ? expf(s[m] * scale() - number.x) : 0.0f;
            d[m] = s[m] * (d[m] - number.y);
        }
        gather(dv, s, dys);
        gather(dk, d, queries);
    }
    // Where heads of queries share keys and values, each writes to a place of its own in [batch, seq, 2, heads, HEAD].
    const long long out_stride = kv_heads == heads ? at.stride : 2 * at.width;
    float* to = dkv + at.token * out_stride + (kv_heads == heads ? at.width : 0) + at.head * HEAD;
    float factor[MINE];
    for (int m = 0; m < MINE; ++m) factor[m] = scale();
    write_rows(dk, factor, to, out_stride, row, seq);
    for (int m = 0; m < MINE; ++m) factor[m] = 1.0f;
    write_rows(dv, factor, to + at.width, out_stride, row, seq);
}

// As in attention.cu.
extern "C" __global__ void __launch_bounds__(256) attention_sum_groups_f32(const float* __restrict__ dkv, float* __restrict__ dqkv, long long n, int heads, int kv_heads) {
    const long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= n) return;
    const int group = heads / kv_heads, shared_width = kv_heads * HEAD, width = heads * HEAD;
    const long long token = i / (2 * shared_width);
    const int column = i % (2 * shared_width), part = column / shared_width, head = column % shared_width / HEAD;
    const float* from = dkv + (token * 2 + part) * width + head * group * HEAD + column % HEAD;
    float sum = 0.0f;
    for (int g = 0; g < group; ++g) sum += from[g * HEAD];
    dqkv[token * (width + 2 * shared_width) + width + column] = sum;
}

}  // namespace attention_f32
