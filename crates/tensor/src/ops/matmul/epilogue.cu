// What follows a matrix product where cuBLASLt cannot do it on the way out: odd widths, or a type for which it
// has no such kernel. c: [rows, width], row after row.

// GPT-2's GELU, x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), and its derivative.
constexpr float ROOT = 0.7978845608028654f;
constexpr float CUBIC = 0.044715f;

DEVICE float gelu(float x) { return 0.5f * x * (1.0f + tanhf(ROOT * (x + CUBIC * x * x * x))); }

DEVICE float gelu_slope(float x) {
    const float t = tanhf(ROOT * (x + CUBIC * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * ROOT * (1.0f + 3.0f * CUBIC * x * x);
}

// c += bias, on every row.
KERNEL(256) add_bias(T* c, const T* bias, u64 elements, u64 width) {
    for (u64 i = thread_in_grid(); i < elements; i += threads_in_grid()) {
        c[i] = from_f32<T>(to_f32(c[i]) + to_f32(bias[i % width]));
    }
}

// pre = c + bias, c = gelu(pre); bias may be null.
KERNEL(256) bias_gelu(T* c, const T* bias, T* pre, u64 elements, u64 width) {
    for (u64 i = thread_in_grid(); i < elements; i += threads_in_grid()) {
        const float x = to_f32(c[i]) + (bias ? to_f32(bias[i % width]) : 0.0f);
        pre[i] = from_f32<T>(x);
        c[i] = from_f32<T>(gelu(x));
    }
}

// c *= gelu'(pre).
KERNEL(256) gelu_backward(T* c, const T* pre, u64 elements) {
    for (u64 i = thread_in_grid(); i < elements; i += threads_in_grid()) {
        c[i] = from_f32<T>(to_f32(c[i]) * gelu_slope(to_f32(pre[i])));
    }
}

// sums[j] = sum over i of x[i, j]; x: [rows, width]. A block of 32 x 8 threads takes 32 columns: each of its
// warps every eighth row, and the eight partial sums are added in order.
KERNEL(256) column_sums(const T* x, T* sums, float* wide_sums, u64 rows, u64 width) {
    __shared__ float partial[8][WARP];
    const u32 column = threadIdx.x % WARP, part = threadIdx.x / WARP;
    const u64 j = static_cast<u64>(blockIdx.x) * WARP + column;
    float sum = 0.0f;
    if (j < width) {
        for (u64 i = part; i < rows; i += 8) sum += to_f32(x[i * width + j]);
    }
    partial[part][column] = sum;
    __syncthreads();
    if (part == 0 && j < width) {
#pragma unroll
        for (int p = 1; p < 8; ++p) sum += partial[p][column];
        if (wide_sums) wide_sums[j] = sum;
        else sums[j] = from_f32<T>(sum);
    }
}

// sums[i] = sum over j of x[i, j]; one block a row.
KERNEL(256) row_sums(const T* x, T* sums, float* wide_sums, u64 width) {
    const u64 i = blockIdx.x;
    float sum = 0.0f;
    for (u64 j = threadIdx.x; j < width; j += blockDim.x) sum += to_f32(x[i * width + j]);
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    if (wide_sums) wide_sums[i] = sum;
    else sums[i] = from_f32<T>(sum);
}
