// Batch normalisation of channels; the formulas are those of batch_norm.rs.
//
// x, y, dy, dx: T [rows, c]; mean, rstd, variance: f32 [c]; scale, shift: [c], f32 where `wide`, else T.
// partial: f32 [pieces, 2, c]; line: f32 [3, c].
//
// Column geometry (lanes.cuh), pieces = ceil(rows / piece):
//   batch_norm_moments(x, partial, rows, c, piece): each piece's mean and sum of squared distances from it
//   batch_norm_forward(x, scale, shift, wide, mean, rstd, plus, relu, y, rows, c, piece): `plus` is added, or is null
//   batch_norm_evaluate(x, scale, shift, wide, mean, variance, plus, relu, y, rows, c, piece, eps)
//   batch_norm_gradient_sums(dy, x, mean, partial, rows, c, piece): each piece's sums of dy and dy (x - mean)
//   batch_norm_backward_input(dy, x, mean, line, dx, rows, c, piece): dx = a dy + b (x - mean) + d
// The same behind ReLU, where dy counts where the output is above zero:
//   batch_norm_gated_sums(dy, x, scale, shift, wide, mean, rstd, partial, rows, c, piece): nothing was added, and the
//     output is made again
//   batch_norm_gated_input(dy, x, scale, shift, wide, mean, rstd, line, dx, y, rows, c, piece): likewise; that output goes
//     to y, unless it is null
//   batch_norm_masked_sums(dy, more, x, mean, y, dz, partial, rows, c, piece): y is the output; dz: T [rows, c], dy, or
//     dy + more unless that is null, where it counts, which backward_input goes on with; dz may be dy
// A warp per channel, grid ceil(c / 8), block 256:
//   batch_norm_statistics(partial, mean, rstd, rows, c, piece, pieces, eps): joined in double by the rule of
//     Chan, Golub and LeVeque (1979)
//   batch_norm_backward_weights(partial, scale, wide, rstd, line, dscale, dshift, rows, c, pieces, narrow): line =
//     a, b, d of the input's gradient; dscale, dshift: [c], f32 or, where narrow, bf16
// A thread per channel, grid ceil(c / 256), block 256:
//   batch_norm_fold(mean, rstd, running_mean, running_variance, c, unbias, eps, momentum): the batch's statistics into
//     the running ones, f32 [c]
//
// forward: moments, statistics, forward. backward: sums, backward_weights, input.

// Where a thread stands: its first column, its piece, and its rows first, first + step, .. before end.
struct Span {
    i64 column, index, first, end, step;
};

// What was written before was written from the beginning, and its end is still in the cache. So the first of two
// passes begins at the end, and the second one where the first has ended.
enum Order { BACKWARD, FORWARD };

template <int N>
DEVICE Span span(i64 rows, i64 piece, Order order) {
    const i64 index = order == BACKWARD ? gridDim.y - 1 - blockIdx.y : blockIdx.y, start = index * piece;
    return {(static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * N, index, start + threadIdx.y,
            start + piece < rows ? start + piece : rows, blockDim.y};
}

// Joins (n, mean, squares) of two sets of numbers into the first.
template <class F>
DEVICE void join(F& n, F& mean, F& squares, F more_n, F more_mean, F more_squares) {
    const F all = n + more_n;
    if (more_n == F(0)) return;
    const F delta = more_mean - mean, share = more_n / all;
    squares += more_squares + delta * delta * n * share;
    mean += delta * share;
    n = all;
}

template <int N>
DEVICE void moments(const T* __restrict__ x, float* __restrict__ partial, i64 rows, i64 c, i64 piece) {
    __shared__ float pool[2][N][THREADS];
    const Span at = span<N>(rows, piece, BACKWARD);
    float mean[N] = {}, squares[N] = {}, n = 0.0f;
    if (at.column < c) {
#pragma unroll 4
        for (i64 row = at.first; row < at.end; row += at.step) {
            float v[N];
            load(x + row * c + at.column, v);
            n += 1.0f;
            const float share = __frcp_rn(n);
            for (int k = 0; k < N; ++k) {
                const float delta = v[k] - mean[k];
                mean[k] += delta * share;
                squares[k] += delta * (v[k] - mean[k]);
            }
        }
    }
    for (int k = 0; k < N; ++k) {
        pool[0][k][threadIdx.y * blockDim.x + threadIdx.x] = mean[k];
        pool[1][k][threadIdx.y * blockDim.x + threadIdx.x] = squares[k];
    }
    __syncthreads();
    for (u32 half = blockDim.y / 2; half > 0; half /= 2) {
        if (threadIdx.y < half) {
            const u32 mine = threadIdx.y * blockDim.x + threadIdx.x, other = mine + half * blockDim.x;
            const i64 height = at.end - at.index * piece;
            const auto seen = [&](i64 y, i64 stride) { return y < height ? (height - y + stride - 1) / stride : 0; };
            // Slot y stands for the rows that equal y modulo 2 half.
            const float here = seen(threadIdx.y, 2 * half), there = seen(threadIdx.y + half, 2 * half);
            for (int k = 0; k < N; ++k) {
                float count = here;
                join(count, pool[0][k][mine], pool[1][k][mine], there, pool[0][k][other], pool[1][k][other]);
            }
        }
        __syncthreads();
    }
    if (threadIdx.y == 0 && at.column < c) {
        for (int k = 0; k < N; ++k) mean[k] = pool[0][k][threadIdx.x], squares[k] = pool[1][k][threadIdx.x];
        store(partial + at.index * 2 * c + at.column, mean);
        store(partial + (at.index * 2 + 1) * c + at.column, squares);
    }
}

KERNEL(256) batch_norm_moments(const T* x, float* partial, i64 rows, i64 c, i64 piece) {
    if (c % LANES == 0)
        moments<LANES>(x, partial, rows, c, piece);
    else
        moments<1>(x, partial, rows, c, piece);
}

KERNEL(256) batch_norm_statistics(const float* partial, float* mean, float* rstd, i64 rows, i64 c, i64 piece,
                                  i64 pieces, float eps) {
    const i64 channel = static_cast<i64>(blockIdx.x) * 8 + warp_in_block();
    if (channel >= c) return;
    double n = 0.0, m = 0.0, squares = 0.0;
    for (i64 i = lane(); i < pieces; i += WARP) {
        const i64 more = i * piece + piece < rows ? piece : rows - i * piece;
        join(n, m, squares, static_cast<double>(more), static_cast<double>(partial[i * 2 * c + channel]),
             static_cast<double>(partial[(i * 2 + 1) * c + channel]));
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        const double more = __shfl_down_sync(FULL_WARP, n, step), more_mean = __shfl_down_sync(FULL_WARP, m, step);
        join(n, m, squares, more, more_mean, __shfl_down_sync(FULL_WARP, squares, step));
    }
    if (lane() == 0) {
        mean[channel] = static_cast<float>(m);
        rstd[channel] = static_cast<float>(1.0 / sqrt(squares / (n > 1.0 ? n : 1.0) + eps));
    }
}

// y = a (x - mean) + b, with a = scale rstd; then a sum, then ReLU, where these are asked for.
template <int N, bool EVALUATE>
DEVICE void normalise(const T* __restrict__ x, Weights scale, Weights shift, const float* mean, const float* spread,
                      const T* __restrict__ plus, int relu, T* __restrict__ y, i64 rows, i64 c, i64 piece, float eps) {
    const Span at = span<N>(rows, piece, FORWARD);
    if (at.column >= c) return;
    float a[N], b[N], m[N], r[N];
    scale.get(at.column, a);
    shift.get(at.column, b);
    load(mean + at.column, m);
    load(spread + at.column, r);
    for (int k = 0; k < N; ++k) a[k] *= EVALUATE ? 1.0f / sqrtf(r[k] + eps) : r[k];
#pragma unroll 4
    for (i64 row = at.first; row < at.end; row += at.step) {
        float v[N];
        load(x + row * c + at.column, v);
        for (int k = 0; k < N; ++k) v[k] = fmaf(v[k] - m[k], a[k], b[k]);
        if (plus) {
            float p[N];
            load(plus + row * c + at.column, p);
            for (int k = 0; k < N; ++k) v[k] += p[k];
        }
        // This way round, a NaN passes.
        if (relu)
            for (int k = 0; k < N; ++k) v[k] = v[k] < 0.0f ? 0.0f : v[k];
        store(y + row * c + at.column, v);
    }
}

KERNEL(256) batch_norm_forward(const T* x, const void* scale, const void* shift, int wide, const float* mean,
                               const float* rstd, const T* plus, int relu, T* y, i64 rows, i64 c, i64 piece) {
    if (c % LANES == 0)
        normalise<LANES, false>(x, {scale, wide}, {shift, wide}, mean, rstd, plus, relu, y, rows, c, piece, 0.0f);
    else
        normalise<1, false>(x, {scale, wide}, {shift, wide}, mean, rstd, plus, relu, y, rows, c, piece, 0.0f);
}

KERNEL(256) batch_norm_evaluate(const T* x, const void* scale, const void* shift, int wide, const float* mean,
                                const float* variance, const T* plus, int relu, T* y, i64 rows, i64 c, i64 piece,
                                float eps) {
    if (c % LANES == 0)
        normalise<LANES, true>(x, {scale, wide}, {shift, wide}, mean, variance, plus, relu, y, rows, c, piece, eps);
    else
        normalise<1, true>(x, {scale, wide}, {shift, wide}, mean, variance, plus, relu, y, rows, c, piece, eps);
}

// Whether dy counts: everywhere, or where the output of ReLU behind the norm is above zero. Nothing but the norm went
// into it: it is made again of x, by the same operation as in `normalise`.
template <int N, bool GATED>
struct Gate {
    float m[N], a[N], b[N];

    DEVICE Gate(i64 column, const float* mean, const float* rstd, Weights scale, Weights shift) {
        load(mean + column, m);
        if constexpr (GATED) {
            float r[N];
            scale.get(column, a);
            shift.get(column, b);
            load(rstd + column, r);
            for (int k = 0; k < N; ++k) a[k] *= r[k];
        }
    }

    // x becomes its distance from the mean, d zero where it does not count; what ReLU gives.
    DEVICE void apply(float (&d)[N], float (&x)[N], float (&output)[N]) const {
        for (int k = 0; k < N; ++k) {
            x[k] -= m[k];
            if constexpr (GATED) {
                const float v = fmaf(x[k], a[k], b[k]);
                d[k] = v > 0.0f ? d[k] : 0.0f;
                output[k] = v < 0.0f ? 0.0f : v;
            }
        }
    }
};

template <int N>
DEVICE void store_sums(float* partial, float (&sum)[N], float (&product)[N], const Span& at, i64 c) {
    sum_over_y(sum);
    sum_over_y(product);
    if (threadIdx.y == 0 && at.column < c) {
        store(partial + at.index * 2 * c + at.column, sum);
        store(partial + (at.index * 2 + 1) * c + at.column, product);
    }
}

template <int N, bool GATED>
DEVICE void gradient_sums(const T* __restrict__ dy, const T* __restrict__ x, Weights scale, Weights shift,
                          const float* mean, const float* rstd, float* __restrict__ partial, i64 rows, i64 c,
                          i64 piece) {
    const Span at = span<N>(rows, piece, BACKWARD);
    float sum[N] = {}, product[N] = {};
    if (at.column < c) {
        const Gate<N, GATED> gate(at.column, mean, rstd, scale, shift);
#pragma unroll 4
        for (i64 row = at.first; row < at.end; row += at.step) {
            float d[N], v[N], output[N];
            load(dy + row * c + at.column, d);
            load(x + row * c + at.column, v);
            gate.apply(d, v, output);
            for (int k = 0; k < N; ++k) sum[k] += d[k], product[k] += d[k] * v[k];
        }
    }
    store_sums(partial, sum, product, at, c);
}

KERNEL(256) batch_norm_gradient_sums(const T* dy, const T* x, const float* mean, float* partial, i64 rows, i64 c,
                                     i64 piece) {
    if (c % LANES == 0)
        gradient_sums<LANES, false>(dy, x, {}, {}, mean, nullptr, partial, rows, c, piece);
    else
        gradient_sums<1, false>(dy, x, {}, {}, mean, nullptr, partial, rows, c, piece);
}

KERNEL(256) batch_norm_gated_sums(const T* dy, const T* x, const void* scale, const void* shift, int wide,
                                  const float* mean, const float* rstd, float* partial, i64 rows, i64 c, i64 piece) {
    if (c % LANES == 0)
        gradient_sums<LANES, true>(dy, x, {scale, wide}, {shift, wide}, mean, rstd, partial, rows, c, piece);
    else
        gradient_sums<1, true>(dy, x, {scale, wide}, {shift, wide}, mean, rstd, partial, rows, c, piece);
}

// dz may be dy: each thread has read what it overwrites.
template <int N>
DEVICE void masked_sums(const T* dy, const T* __restrict__ more, const T* __restrict__ x, const float* mean,
                        const T* __restrict__ y, T* dz, float* __restrict__ partial, i64 rows, i64 c, i64 piece) {
    const Span at = span<N>(rows, piece, BACKWARD);
    float sum[N] = {}, product[N] = {};
    if (at.column < c) {
        float m[N];
        load(mean + at.column, m);
#pragma unroll 4
        for (i64 row = at.first; row < at.end; row += at.step) {
            float d[N], v[N], out[N];
            load(dy + row * c + at.column, d);
            load(x + row * c + at.column, v);
            load(y + row * c + at.column, out);
            if (more) {
                float p[N];
                load(more + row * c + at.column, p);
                // Rounded as a sum that is stored.
                for (int k = 0; k < N; ++k) d[k] = to_f32(from_f32<T>(d[k] + p[k]));
            }
            for (int k = 0; k < N; ++k) {
                d[k] = out[k] > 0.0f ? d[k] : 0.0f;
                sum[k] += d[k], product[k] += d[k] * (v[k] - m[k]);
            }
            store(dz + row * c + at.column, d);
        }
    }
    store_sums(partial, sum, product, at, c);
}

KERNEL(256) batch_norm_masked_sums(const T* dy, const T* more, const T* x, const float* mean, const T* y, T* dz,
                                   float* partial, i64 rows, i64 c, i64 piece) {
    if (c % LANES == 0)
        masked_sums<LANES>(dy, more, x, mean, y, dz, partial, rows, c, piece);
    else
        masked_sums<1>(dy, more, x, mean, y, dz, partial, rows, c, piece);
}

KERNEL(256) batch_norm_backward_weights(const float* partial, const void* scale, int wide, const float* rstd,
                                        float* line, void* dscale, void* dshift, i64 rows, i64 c, i64 pieces,
                                        int narrow) {
    const i64 channel = static_cast<i64>(blockIdx.x) * 8 + warp_in_block();
    if (channel >= c) return;
    double sum = 0.0, product = 0.0;
    for (i64 i = lane(); i < pieces; i += WARP) {
        sum += partial[i * 2 * c + channel];
        product += partial[(i * 2 + 1) * c + channel];
    }
    sum = warp_sum(sum);
    product = warp_sum(product) * rstd[channel];
    if (lane() == 0) {
        float weight[1];
        Weights{scale, wide}.get(channel, weight);
        const double n = rows > 1 ? rows : 1, r = rstd[channel], a = weight[0] * r;
        line[channel] = static_cast<float>(a);
        line[c + channel] = static_cast<float>(-a * r * product / n);
        line[2 * c + channel] = static_cast<float>(-a * sum / n);
        put(dscale, channel, static_cast<float>(product), narrow);
        put(dshift, channel, static_cast<float>(sum), narrow);
    }
}

template <int N, bool GATED>
DEVICE void backward_input(const T* __restrict__ dy, const T* __restrict__ x, Weights scale, Weights shift,
                           const float* mean, const float* rstd, const float* line, T* __restrict__ dx,
                           T* __restrict__ y, i64 rows, i64 c, i64 piece) {
    const Span at = span<N>(rows, piece, FORWARD);
    if (at.column >= c) return;
    const Gate<N, GATED> gate(at.column, mean, rstd, scale, shift);
    float a[N], b[N], d[N];
    load(line + at.column, a);
    load(line + c + at.column, b);
    load(line + 2 * c + at.column, d);
#pragma unroll 4
    for (i64 row = at.first; row < at.end; row += at.step) {
        float g[N], v[N], output[N];
        load(dy + row * c + at.column, g);
        load(x + row * c + at.column, v);
        gate.apply(g, v, output);
        for (int k = 0; k < N; ++k) g[k] = a[k] * g[k] + (b[k] * v[k] + d[k]);
        store(dx + row * c + at.column, g);
        if constexpr (GATED)
            if (y) store(y + row * c + at.column, output);
    }
}

KERNEL(256) batch_norm_backward_input(const T* dy, const T* x, const float* mean, const float* line, T* dx, i64 rows,
                                      i64 c, i64 piece) {
    if (c % LANES == 0)
        backward_input<LANES, false>(dy, x, {}, {}, mean, nullptr, line, dx, nullptr, rows, c, piece);
    else
        backward_input<1, false>(dy, x, {}, {}, mean, nullptr, line, dx, nullptr, rows, c, piece);
}

KERNEL(256) batch_norm_gated_input(const T* dy, const T* x, const void* scale, const void* shift, int wide,
                                   const float* mean, const float* rstd, const float* line, T* dx, T* y, i64 rows,
                                   i64 c, i64 piece) {
    if (c % LANES == 0)
        backward_input<LANES, true>(dy, x, {scale, wide}, {shift, wide}, mean, rstd, line, dx, y, rows, c, piece);
    else
        backward_input<1, true>(dy, x, {scale, wide}, {shift, wide}, mean, rstd, line, dx, y, rows, c, piece);
}

KERNEL(256) batch_norm_fold(const float* mean, const float* rstd, float* running_mean, float* running_variance, i64 c,
                            float unbias, float eps, float momentum) {
    const i64 i = thread_in_grid();
    if (i >= c) return;
    const float variance = fmaxf(1.0f / (rstd[i] * rstd[i]) - eps, 0.0f) * unbias;
    running_mean[i] += momentum * (mean[i] - running_mean[i]);
    running_variance[i] += momentum * (variance - running_variance[i]);
}
