// Softmax and cross-entropy together, and the gradient in the place of the logits.
//
// logits: T [rows, v], 16-byte aligned; targets: u32 [rows], below v; losses: double [rows]; correct: u32 [rows].
//
// cross_entropy_forward_backward(logits, targets, losses, correct, v, scale, kept): logits become
//   scale (softmax - onehot). grid rows, block 512, dynamic shared bytes kept sizeof(T).
//   The first `kept` logits of a row stay in shared memory between the two readings, the rest is read again
//   (from the second-level cache, mostly). kept = min(v, 74 KiB / 2) for bf16, so that three blocks share a
//   multiprocessor, and min(v, 112 KiB / 4) for f32 are good, rounded down to a multiple of 8; 0 is valid. Above
//   48 KiB the launcher raises the function's limit of dynamic shared memory.
// cross_entropy_evaluate(logits, targets, losses, correct, v): the same without the gradient. grid rows, block 512.
// cross_entropy_total(losses, correct, rows, loss_sum, correct_sum): double [1], u64 [1]. grid 1, block 1024.
//
// Where ranks have the logits of some classes each, `first` on, `classes` of them, padded with -inf to v:
// cross_entropy_read_part(logits, targets, numbers, v, first, classes): numbers: f32 [rows, 4], of each row the largest
//   logit, the sum of exp(x - largest), the number of its class, the target's logit or -inf. grid rows, block 512.
// cross_entropy_join(numbers, targets, losses, correct, rows, ranks): numbers: f32 [ranks, rows, 4] of all ranks.
//   grid ceil(rows / 256), block 256.
// cross_entropy_differentiate_part(logits, targets, numbers, rows, ranks, v, first, classes, scale). grid rows, block 512.
//
// One reading keeps, per thread, a maximum and the sum of exp(x - maximum). A NaN does not reach the maximum but
// reaches the sum, and with it the loss. A target beyond v gives a loss of NaN and no onehot; IGNORED gives a loss and a
// gradient of 0.

// The target of a row that does not count.
enum : u32 { IGNORED = 0xffffffffu };

// Loads in flight per thread: BATCH groups.
enum : int { BLOCK = 512, BATCH = 2 };

struct Running {
    // Finite, so that a row that begins with -inf does not compute -inf - -inf.
    float max = -3.402823466e38f;
    float sum = 0.0f;

    template <int N>
    DEVICE void add(const float (&x)[N]) {
        float top = max;
        for (int j = 0; j < N; ++j) top = fmaxf(top, x[j]);
        sum *= __expf(max - top);
        max = top;
        for (int j = 0; j < N; ++j) sum += __expf(x[j] - top);
    }
};

// A row's maximum and sum, to all threads.
template <int N>
DEVICE Running read_row(const T* x, i64 v, T* shared, i64 kept) {
    Running mine;
    for (i64 first = threadIdx.x * N; first < v; first += BATCH * BLOCK * N) {
        Raw<T, N> raw[BATCH];
        for (int b = 0; b < BATCH; ++b)
            if (first + b * BLOCK * N < v) raw[b].read(x + first + b * BLOCK * N);
        for (int b = 0; b < BATCH; ++b) {
            const i64 i = first + b * BLOCK * N;
            float group[N];
            if (i < kept) raw[b].write_shared(shared + i);
            raw[b].get(group);
            if (i < v) mine.add(group);
        }
    }
    Running all;
    all.max = block_max(mine.max);
    all.sum = block_sum(mine.sum * __expf(mine.max - all.max));
    return all;
}

// The loss of a row, and whether the target is the first of the largest. All threads call it, before logits change.
DEVICE void judge(const T* x, i64 target, i64 v, Running row, double* loss, u32* correct) {
    const bool valid = target < v;
    const float logit = valid ? to_f32(x[target]) : __int_as_float(0x7fc00000);
    int earlier = 0;
    if (logit == row.max)
        for (i64 i = threadIdx.x; i < target && !earlier; i += BLOCK) earlier = to_f32(x[i]) == row.max;
    earlier = __syncthreads_or(earlier);
    if (threadIdx.x == 0) {
        *loss = target == IGNORED ? 0.0 : log(static_cast<double>(row.sum)) + (static_cast<double>(row.max) - logit);
        *correct = logit == row.max && !earlier;
    }
}

template <int N>
DEVICE void forward_backward(T* x, i64 target, double* loss, u32* correct, i64 v, float scale, T* shared, i64 kept) {
    const Running row = read_row<N>(x, v, shared, kept);
    judge(x, target, v, row, loss, correct);
    const float share = target == IGNORED ? 0.0f : scale / row.sum;
    for (i64 first = threadIdx.x * N; first < v; first += BATCH * BLOCK * N) {
        Raw<T, N> raw[BATCH];
        for (int b = 0; b < BATCH; ++b) {
            const i64 i = first + b * BLOCK * N;
            if (i < kept)
                raw[b].read(shared + i);
            else if (i < v)
                raw[b].read(x + i);
        }
        for (int b = 0; b < BATCH; ++b) {
            const i64 i = first + b * BLOCK * N;
            float group[N];
            raw[b].get(group);
            for (int j = 0; j < N; ++j) {
                group[j] = __expf(group[j] - row.max) * share;
                if (i + j == target) group[j] -= scale;
            }
            if (i < v) store(x + i, group);
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 3) cross_entropy_forward_backward(T* logits, const u32* targets, double* losses, u32* correct, i64 v,
                                             float scale, i64 kept) {
    extern __shared__ uint4 shared[];
    const i64 row = blockIdx.x;
    T* const x = logits + row * v;
    T* const copy = reinterpret_cast<T*>(shared);
    if (v % LANES == 0)
        forward_backward<LANES>(x, targets[row], losses + row, correct + row, v, scale, copy, kept);
    else
        forward_backward<1>(x, targets[row], losses + row, correct + row, v, scale, copy, kept);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 3) cross_entropy_evaluate(const T* logits, const u32* targets, double* losses, u32* correct, i64 v) {
    const i64 row = blockIdx.x;
    const T* const x = logits + row * v;
    const Running all = v % LANES == 0 ? read_row<LANES>(x, v, nullptr, 0) : read_row<1>(x, v, nullptr, 0);
    judge(x, targets[row], v, all, losses + row, correct + row);
}

KERNEL(1024) cross_entropy_total(const double* losses, const u32* correct, i64 rows, double* loss_sum,
                                 u64* correct_sum) {
    double loss = 0.0, right = 0.0;
    for (i64 i = threadIdx.x; i < rows; i += blockDim.x) loss += losses[i], right += correct[i];
    loss = block_sum(loss);
    right = block_sum(right);
    if (threadIdx.x == 0) *loss_sum = loss, *correct_sum = static_cast<u64>(right);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 3) cross_entropy_read_part(const T* logits, const u32* targets, float* numbers, i64 v, u32 first, u32 classes) {
    const i64 row = blockIdx.x;
    const T* const x = logits + row * v;
    const Running all = v % LANES == 0 ? read_row<LANES>(x, v, nullptr, 0) : read_row<1>(x, v, nullptr, 0);
    // The first class that has the largest logit, as a float, so that a maximum finds it.
    float earliest = -3.402823466e38f;
    for (i64 i = threadIdx.x; i < v; i += BLOCK)
        if (to_f32(x[i]) == all.max) {
            earliest = -static_cast<float>(i);
            break;
        }
    earliest = block_max(earliest);
    if (threadIdx.x == 0) {
        const u32 target = targets[row] - first;
        float* const own = numbers + 4 * row;
        own[0] = all.max;
        own[1] = all.sum;
        own[2] = static_cast<float>(first) - earliest;
        own[3] = target < classes ? to_f32(x[target]) : __int_as_float(0xff800000);
    }
}

// The maximum and the sum of a row over all ranks, in the order of ranks.
DEVICE Running join(const float* numbers, i64 row, i64 rows, i64 ranks) {
    Running all;
    for (i64 rank = 0; rank < ranks; ++rank) all.max = fmaxf(all.max, numbers[4 * (rank * rows + row)]);
    for (i64 rank = 0; rank < ranks; ++rank) {
        const float* const of = numbers + 4 * (rank * rows + row);
        all.sum += of[1] * __expf(of[0] - all.max);
    }
    return all;
}

KERNEL(256) cross_entropy_join(const float* numbers, const u32* targets, double* losses, u32* correct, i64 rows, i64 ranks) {
    const i64 row = thread_in_grid();
    if (row >= rows) return;
    const Running all = join(numbers, row, rows, ranks);
    float logit = __int_as_float(0xff800000), first = -1.0f;
    for (i64 rank = ranks - 1; rank >= 0; --rank) {
        const float* const of = numbers + 4 * (rank * rows + row);
        logit = fmaxf(logit, of[3]);
        if (of[0] == all.max) first = of[2];
    }
    const bool counts = targets[row] != IGNORED;
    losses[row] = counts ? log(static_cast<double>(all.sum)) + (static_cast<double>(all.max) - logit) : 0.0;
    correct[row] = counts && first == static_cast<float>(targets[row]);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 3) cross_entropy_differentiate_part(T* logits, const u32* targets, const float* numbers, i64 rows, i64 ranks,
                                               i64 v, u32 first, u32 classes, float scale) {
    const i64 row = blockIdx.x;
    T* const x = logits + row * v;
    const Running all = join(numbers, row, rows, ranks);
    const u32 target = targets[row] - first;
    const i64 own = target < classes ? target : v;
    const float share = targets[row] == IGNORED ? 0.0f : scale / all.sum;
    for (i64 i = threadIdx.x; i < v; i += BLOCK) {
        const float gradient = __expf(to_f32(x[i]) - all.max) * share;
        x[i] = from_f32<T>(i == own ? gradient - scale : gradient);
    }
}
