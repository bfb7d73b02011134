// Sums over many elements, each in two stages: partial sums by geometry, then their sum in a fixed order.
//
// Column sums of x: T [rows, c], in f32:
//   reduce_sum_rows(x, partial, rows, c, piece): partial: f32 [pieces, c], piece i has rows i piece ..
//     column geometry (lanes.cuh), pieces = ceil(rows / piece); about 256 pieces are good.
//   reduce_total(partial, y, pieces, width, first, c, narrow): y [c] = columns first .. first + c of partial
//     [pieces, width], summed; y is f32 or, where narrow, bf16. grid ceil(c / 32), block (32, 8).
//
// Norms and dot products, in double:
//   reduce_squared_norm(x, partial, n), reduce_dot_f32, reduce_dot_bf16(a, b, partial, n): a, x: T [n];
//     b: f32 or bf16 [n]; partial: double [blocks]. grid blocks = ceil(n / 16384), block 256.
//   reduce_total_f64(partial, y, n): y: double [1]. grid 1, block 1024.

constexpr i64 SPAN = 16384;

template <int N>
DEVICE void sum_rows(const T* __restrict__ x, float* __restrict__ partial, i64 rows, i64 c, i64 piece) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    const i64 first = blockIdx.y * piece, end = first + piece < rows ? first + piece : rows;
    float sum[N] = {};
    if (column < c) {
#pragma unroll 4
        for (i64 row = first + threadIdx.y; row < end; row += blockDim.y) {
            float v[N];
            load(x + row * c + column, v);
            for (int k = 0; k < N; ++k) sum[k] += v[k];
        }
    }
    sum_over_y(sum);
    if (threadIdx.y == 0 && column < c) store(partial + blockIdx.y * c + column, sum);
}

KERNEL(256) reduce_sum_rows(const T* x, float* partial, i64 rows, i64 c, i64 piece) {
    if (c % LANES == 0)
        sum_rows<LANES>(x, partial, rows, c, piece);
    else
        sum_rows<1>(x, partial, rows, c, piece);
}

KERNEL(256) reduce_total(const float* partial, void* y, i64 pieces, i64 width, i64 first, i64 c, int narrow) {
    const i64 column = static_cast<i64>(blockIdx.x) * 32 + threadIdx.x;
    const float sum = column_total(partial, pieces, width, column < c ? first + column : width);
    if (threadIdx.y == 0 && column < c) put(y, column, sum, narrow);
}

template <class B>
DEVICE void dot(const T* __restrict__ a, const B* __restrict__ b, double* partial, i64 n) {
    constexpr int N = common_width<T, B>();
    const i64 first = blockIdx.x * SPAN, end = first + SPAN < n ? first + SPAN : n;
    double sum = 0.0;
    if (aligned(a) && aligned(b) && first + SPAN <= n) {
#pragma unroll 4
        for (i64 i = first + threadIdx.x * N; i < end; i += THREADS * N) {
            float v[N], w[N];
            load(a + i, v);
            load(b + i, w);
            for (int k = 0; k < N; ++k) sum += static_cast<double>(v[k]) * w[k];
        }
    } else {
        for (i64 i = first + threadIdx.x; i < end; i += THREADS)
            sum += static_cast<double>(to_f32(a[i])) * to_f32(b[i]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The two equal loads become one.
KERNEL(256) reduce_squared_norm(const T* x, double* partial, i64 n) { dot(x, x, partial, n); }
KERNEL(256) reduce_dot_f32(const T* a, const float* b, double* partial, i64 n) { dot(a, b, partial, n); }
KERNEL(256) reduce_dot_bf16(const T* a, const bf16* b, double* partial, i64 n) { dot(a, b, partial, n); }

KERNEL(1024) reduce_total_f64(const double* partial, double* y, i64 n) {
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *y = sum;
}
