// Convolution of channels-last images as a matrix product whose left matrix, the patches, is never stored: tiles of
// it are gathered from the images on their way to shared memory. The meaning is that of conv.rs.
//
// x, dx: T [batch, h, w, c]; w, dw: T [o, k, k, c]; bias: T [o] or null; y, dy: T [batch, oh, ow, o].
// Shape: eleven ints, by value. Fewer than 2^31 pixels on either side.
//
//   pass             rows of the product     columns   summed over                  right matrix
//   forward          pixels of y             o         (u, v, c)                    w, [o, k k c]
//   backward_input   pixels of x             c         (u, v, o)                    conv_input_weight's [c, k k o]
//   backward_weight  o                       (u, v, c) pixels of y, cut in splits   patches of x
//
// conv_input_weight(w, rows, shape): w in the order that backward_input reads. grid ceil(o c k k / 256), block 256.
// conv_add_bias(y, bias, relu, rows, o, piece): y += bias, then ReLU if it is asked for, for products that are not ours.
//   Columns of lanes.cuh.
// conv_forward(x, w, bias, y, shape), conv_backward_input(dy, rows, dx, shape): one block per tile, f32 64 x 64,
//   bf16 128 x 64 if there are at most 64 columns, else 128 x 128. grid ceil(rows / tile height)
//   ceil(columns / tile width), block 256, dynamic shared bytes 0 for f32, (128 + tile width) 240 for bf16, for
//   which the launcher raises the function's limit to 61440.
// conv_backward_weight(x, dy, partial, shape, share): partial: f32 [splits, o, k k c], split i sums pixels i share ..;
//   share is a multiple of 32, splits = ceil(pixels of y / share) <= 65535. Tiles are f32 64 x 64, bf16 64 x 128 over
//   o x (u, v, c). grid (ceil(k k c / tile width), ceil(o / 64), splits), block 256.
// conv_weight_total(partial, dw, splits, shape): the sum of the splits, in an order that their number fixes.
//   block (256 / y, y) with y a power of two up to 8, the more the more splits there are; grid ceil(o c k k / (256 / y)).
//
// This file stands behind its parts, which conv/cuda.rs puts together: patches, product_f32, product_bf16.
//
// f32 runs on the CUDA cores, bf16 on the tensor cores (mma.sync, sm_80 and later) with f32 sums. Channels move 16
// bytes at a time where they divide by 4 (f32) or 8 (bf16), otherwise one by one: pad_channels is worth its copy.

template <int N>
DEVICE void add_bias(T* y, const T* bias, int relu, i64 rows, i64 o, i64 piece) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    const i64 end = (blockIdx.y + 1) * piece < rows ? (blockIdx.y + 1) * piece : rows;
    if (column >= o) return;
    float b[N];
    load(bias + column, b);
#pragma unroll 4
    for (i64 row = blockIdx.y * piece + threadIdx.y; row < end; row += blockDim.y) {
        float v[N];
        load(y + row * o + column, v);
        for (int k = 0; k < N; ++k) v[k] += b[k];
        // This way round, a NaN passes.
        if (relu)
            for (int k = 0; k < N; ++k) v[k] = v[k] < 0.0f ? 0.0f : v[k];
        store(y + row * o + column, v);
    }
}

KERNEL(256) conv_add_bias(T* y, const T* bias, int relu, i64 rows, i64 o, i64 piece) {
    if (o % LANES == 0)
        add_bias<LANES>(y, bias, relu, rows, o, piece);
    else
        add_bias<1>(y, bias, relu, rows, o, piece);
}

KERNEL(256) conv_input_weight(const T* w, T* rows, Shape s) {
    const i64 i = thread_in_grid();
    const int area = s.kernel * s.kernel;
    if (i >= static_cast<i64>(s.o) * s.c * area) return;
    const i64 c = i / (area * s.o), o = i % s.o;
    const int uv = i / s.o % area;
    rows[i] = w[(o * area + uv) * s.c + c];
}

// Two blocks on a multiprocessor.
#define PAIRED extern "C" __global__ void __launch_bounds__(256, 2)

PAIRED conv_forward(const T* x, const T* w, const T* bias, T* y, Shape s) {
    product(Forward<T>{x, s}, w, bias, y);
}

PAIRED conv_backward_input(const T* dy, const T* rows, T* dx, Shape s) {
    product(Backward<T>{dy, s}, rows, static_cast<const T*>(nullptr), dx);
}

KERNEL(256) conv_backward_weight(const T* x, const T* dy, float* partial, Shape s, int share) {
    const i64 pixels = static_cast<i64>(s.batch) * s.oh * s.ow, first = static_cast<i64>(blockIdx.z) * share;
    const i64 end = first + share < pixels ? first + share : pixels;
    partial += static_cast<i64>(blockIdx.z) * s.o * s.kernel * s.kernel * s.c;
    weight_product(Forward<T>{x, s}, dy, partial, static_cast<int>(first), static_cast<int>(end));
}

KERNEL(256) conv_weight_total(const float* partial, T* dw, i64 splits, Shape s) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 size = static_cast<i64>(s.o) * s.c * s.kernel * s.kernel;
    const float sum = column_total(partial, splits, size, i);
    if (threadIdx.y == 0 && i < size) dw[i] = from_f32<T>(sum);
}
