// Causal attention on bf16 tensor cores, forward and backward, without the [seq, seq] scores in memory.
//
// It follows FlashAttention-2 (Dao, 2023): a block of queries walks over tiles of keys and values, keeps a
// running maximum and sum of each row (the online softmax of Milakov and Gimelshein, 2018), and the backward
// recomputes the probabilities from the logsumexp. Products are mma.sync m16n8k16 with f32 sums, operands
// come through cp.async into swizzled shared memory and ldmatrix. Compute capability 8.0 or newer; it
// includes nothing, since NVRTC may have no headers. Built once per head size: -DHEAD=64 (32, 64, 80, 96, 128).
//
// This file stands behind its parts, which attention/cuda.rs puts together:
//   tiles, products                     what the kernels share
//   forward, backward_query             a kernel each
//   backward_key, backward_key_paired   one kernel in two forms, for heads up to 64 and above
// A kernel's part opens with its settings: WARPS in a block, STACK of 16-row tiles a warp owns, TILE rows of the
// other side in a stage of shared memory, CHUNK of them a warp takes in one step, KEEP its own operands in
// registers or read them from shared memory each time, BLOCKS that must fit on a multiprocessor.
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
//   qkv, dqkv: [batch, seq, heads + 2 kv_heads, HEAD] bf16    query, key and value of a token side by side; a head
//                                                   of keys and values serves heads / kv_heads neighbouring heads of queries
//   y, dy:     [batch, seq, heads * HEAD]   bf16
//   logsumexp: [batch, heads, seq]          f32     of the scaled scores, natural logarithm
//   rows:      [batch, heads, seq, 2]       f32     workspace of the backward: what the sums of a query's scores
//                                                   and of its dp start from, -logsumexp / scale and -sum(dy * y)
//   positions: u32 [batch, seq]   of tokens in their documents: keys before a query's document are not seen. Null: one document.
// Pointers are aligned to 16 bytes. seq is any number >= 1.
//
// Launch: grid ceil(seq / rows) * heads * batch (one-dimensional), with rows, threads of a block and bytes of
// dynamic shared memory as `attention_geometry` at the end gives them per kernel, where attention/cuda.rs reads them.
//   attention_forward(qkv, y, logsumexp, positions, seq, heads, kv_heads)
//   attention_backward_query(qkv, y, dy, logsumexp, rows, dqkv, positions, seq, heads, kv_heads)    first: writes rows and dq
//   attention_backward_key(qkv, dy, rows, dkv, positions, seq, heads, kv_heads)                     then: writes dk and dv, see `key_place`
//   attention_sum_groups(dkv, dqkv, n, heads, kv_heads)    last, where heads share: n = batch * seq * 2 * kv_heads * HEAD,
//                                                          grid ceil(n / 256), block 256
//
// Where the time goes (H200, Nsight Compute): the tensor pipe is busy half of the time, shared memory up to
// 60 %, issue slots 35 %; with two warps a scheduler the rest is latency. Tried and slower: rows padded by 16
// bytes instead of swizzled (copies then straddle lines), mbarriers instead of a block barrier in the pairs'
// ring, the second warp of a pair one chunk behind the first, a third stage, 16 rows a warp.

namespace attention {

// What the host needs to launch each kernel: rows of a block, threads, bytes of dynamic shared memory.
extern "C" __constant__ int attention_geometry[3][3] = {
    {forward::ROWS, forward::THREADS, forward::SHARED},
    {backward_query::ROWS, backward_query::THREADS, backward_query::SHARED},
    {backward_key::ROWS, backward_key::THREADS, backward_key::SHARED},
};

// dk and dv of a shared head: the sum of what each head of queries of its group has left, in their order.
extern "C" __global__ void __launch_bounds__(256) attention_sum_groups(const half_word* __restrict__ dkv, half_word* __restrict__ dqkv, long long n, int heads, int kv_heads) {
    const long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= n) return;
    const int group = heads / kv_heads, shared_width = kv_heads * HEAD, width = heads * HEAD;
    const long long token = i / (2 * shared_width);
    const int column = i % (2 * shared_width), part = column / shared_width, head = column % shared_width / HEAD;
    const half_word* from = dkv + (token * 2 + part) * width + head * group * HEAD + column % HEAD;
    float sum = 0.0f;
    for (int g = 0; g < group; ++g) sum += __uint_as_float(static_cast<u32>(from[g * HEAD]) << 16);
    dqkv[token * (width + 2 * shared_width) + width + column] = static_cast<half_word>(f32_to_bf16x2(sum, 0.0f) & 0xffffu);
}

}  // namespace attention
