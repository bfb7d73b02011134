// Rows of a table by their number, and learned positions.
//
// ids: u32 [n], n = b t; table, dtable: T [vocab, c], whose rows have the ids from `first` on; y, dy: T [n, c];
// positions: [context, c], f32 where `wide`, else T, of which `begin` is that of the first of every t rows. Here N = LANES (4 f32, 8 bf16) if c divides by it, else 1.
//
// embedding_forward(ids, table, y, n, c, vocab, first, missing): y = table[id - first]. A row whose id is not in the
//   table is filled with `missing`. grid ceil(n / 8), block (32, 8).
// embedding_add_positions(x, positions, wide, y, n, t, c, begin, more): y = x + positions[begin + i mod t]; y may be x. The
//   same grid. more: u32 [1], added to `begin`, or null.
// embedding_positions_slice(positions, slice, n, t, all, first): u32 [n / t, all], columns first .. first + t, to u32 [n].
//   grid ceil(n / 256), block 256.
// embedding_positions_backward(dy, dpositions, n, t, c, context, begin): dpositions: T [context, c], the sums over the
//   batch; zero before `begin` and beyond t. grid (ceil(context / 8), ceil(c / (32 N))), block (32, 8).
//
// The table's gradient adds the rows of dy that share an id in the order of their places, so it repeats. A
// counting sort brings places together: integer atomics count and hand out slots, in no particular order, and
// each place then finds its rank among those of its id. counts: u32 [vocab + 1]; loose, order: u32 [n].
//   1. counts set to zero by the launcher
//   2. embedding_count(ids, counts, n, vocab, first): grid ceil(n / 256), block 256
//   3. embedding_scan(counts, vocab): counts become starts; the last is their sum. grid 1, block 1024
//   4. embedding_scatter(ids, counts, loose, n, vocab, first): starts become ends, as in embedding.rs. grid ceil(n / 256), block 256
//   5. embedding_rank(ids, counts, loose, order, n, vocab, first): grid ceil(n / 256), block 256
//   6. embedding_backward(dy, counts, order, dtable, vocab, c, accumulate): dtable = sums or, where accumulate,
//      dtable += sums. grid (ceil(vocab / 8), ceil(c / (32 N))), block (32, 8)
// Ids that are not in the table are left out: less than `first` becomes more than any, as u32.

enum : int { ROWS = 8, SHORT = 16 };

template <int N>
DEVICE void gather(const u32* ids, const T* __restrict__ table, T* __restrict__ y, i64 n, i64 c, i64 vocab, u32 first,
                   float missing) {
    const i64 row = row_in_grid();
    if (row >= n) return;
    const i64 at = ids[row] - first;
    for (i64 i = threadIdx.x * N; i < c; i += 32 * N) {
        float v[N];
        for (int j = 0; j < N; ++j) v[j] = missing;
        if (at < vocab) load(table + at * c + i, v);
        store(y + row * c + i, v);
    }
}

KERNEL(256) embedding_forward(const u32* ids, const T* table, T* y, i64 n, i64 c, i64 vocab, u32 first, float missing) {
    if (c % LANES == 0)
        gather<LANES>(ids, table, y, n, c, vocab, first, missing);
    else
        gather<1>(ids, table, y, n, c, vocab, first, missing);
}

template <int N>
DEVICE void add_positions(const T* __restrict__ x, Weights positions, T* __restrict__ y, i64 n, i64 t, i64 c, i64 begin) {
    const i64 row = row_in_grid();
    if (row >= n) return;
    const i64 position = (begin + row % t) * c;
#pragma unroll 4
    for (i64 i = threadIdx.x * N; i < c; i += 32 * N) {
        float v[N], p[N];
        load(x + row * c + i, v);
        positions.get(position + i, p);
        for (int j = 0; j < N; ++j) v[j] += p[j];
        store(y + row * c + i, v);
    }
}

KERNEL(256) embedding_add_positions(const T* x, const void* positions, int wide, T* y, i64 n, i64 t, i64 c, i64 begin,
                                    const u32* more) {
    if (more) begin += *more;
    if (c % LANES == 0)
        add_positions<LANES>(x, {positions, wide}, y, n, t, c, begin);
    else
        add_positions<1>(x, {positions, wide}, y, n, t, c, begin);
}

template <int N>
DEVICE void positions_backward(const T* __restrict__ dy, T* __restrict__ dpositions, i64 n, i64 t, i64 c,
                               i64 context, i64 begin) {
    const i64 position = row_in_grid();
    const i64 column = (static_cast<i64>(blockIdx.y) * 32 + threadIdx.x) * N;
    if (position >= context || column >= c) return;
    float sum[N] = {};
    if (position >= begin && position < begin + t) {
#pragma unroll 8
        for (i64 row = position - begin; row < n; row += t) {
            float v[N];
            load(dy + row * c + column, v);
            for (int j = 0; j < N; ++j) sum[j] += v[j];
        }
    }
    store(dpositions + position * c + column, sum);
}

KERNEL(256) embedding_positions_backward(const T* dy, T* dpositions, i64 n, i64 t, i64 c, i64 context, i64 begin) {
    if (c % LANES == 0)
        positions_backward<LANES>(dy, dpositions, n, t, c, context, begin);
    else
        positions_backward<1>(dy, dpositions, n, t, c, context, begin);
}

KERNEL(256) embedding_positions_slice(const u32* positions, u32* slice, i64 n, i64 t, i64 all, i64 first) {
    const i64 i = thread_in_grid();
    if (i < n) slice[i] = positions[i / t * all + first + i % t];
}

KERNEL(256) embedding_count(const u32* ids, u32* counts, i64 n, i64 vocab, u32 first) {
    const i64 i = thread_in_grid();
    if (i < n && ids[i] - first < vocab) atomicAdd(counts + (ids[i] - first), 1u);
}

KERNEL(1024) embedding_scan(u32* counts, i64 vocab) {
    __shared__ u32 totals[WARP];
    u32 before = 0;
    for (i64 first = 0; first <= vocab; first += 4096) {
        const i64 at = first + threadIdx.x * 4;
        u32 own[4], sum = 0;
        for (int j = 0; j < 4; ++j) own[j] = at + j < vocab ? counts[at + j] : 0, sum += own[j];
        u32 scan = sum;
        for (int step = 1; step < WARP; step *= 2) {
            const u32 left = __shfl_up_sync(FULL_WARP, scan, step);
            if (lane() >= step) scan += left;
        }
        if (lane() == WARP - 1) totals[warp_in_block()] = scan;
        __syncthreads();
        // Every warp adds up the totals before its own, and all of them.
        u32 total = totals[lane()], prefix = lane() < warp_in_block() ? total : 0;
        for (int step = WARP / 2; step > 0; step /= 2) {
            total += __shfl_xor_sync(FULL_WARP, total, step);
            prefix += __shfl_xor_sync(FULL_WARP, prefix, step);
        }
        u32 start = before + prefix + scan - sum;
        for (int j = 0; j < 4; start += own[j], ++j)
            if (at + j <= vocab) counts[at + j] = start;
        before += total;
        __syncthreads();
    }
}

KERNEL(256) embedding_scatter(const u32* ids, u32* counts, u32* loose, i64 n, i64 vocab, u32 first) {
    const i64 i = thread_in_grid();
    if (i < n && ids[i] - first < vocab) loose[atomicAdd(counts + (ids[i] - first), 1u)] = static_cast<u32>(i);
}

KERNEL(256) embedding_rank(const u32* ids, const u32* ends, const u32* loose, u32* order, i64 n, i64 vocab,
                           u32 first) {
    const i64 i = thread_in_grid();
    // The last entry of `ends` is the number of places with a valid id.
    if (i >= n || i >= ends[vocab]) return;
    const u32 place = loose[i], id = ids[place] - first;
    const u32 start = id == 0 ? 0 : ends[id - 1], end = ends[id];
    u32 rank = 0;
#pragma unroll 8
    for (u32 j = start; j < end; ++j) rank += loose[j] < place;
    order[start + rank] = place;
}

// Adds to `sum` the rows of dy at order[first], order[first + step], .. before `end`. A warp calls it together: each
// lane reads one place ahead of the sums, so that the rows do not wait for their numbers one by one.
template <int N>
DEVICE void add_places(const T* __restrict__ dy, const u32* __restrict__ order, u32 first, u32 end, u32 step, i64 c,
                       bool inside, float (&sum)[N]) {
    for (; first < end; first += WARP * step) {
        const u32 ahead = first + lane() * step;
        const u32 own = ahead < end ? order[ahead] : 0;
        const u32 left = (end - first + step - 1) / step, count = left < WARP ? left : WARP;
#pragma unroll 8
        for (u32 j = 0; j < count; ++j) {
            const u32 place = __shfl_sync(FULL_WARP, own, j);
            float v[N] = {};
            if (inside) load(dy + place * c, v);
            for (int k = 0; k < N; ++k) sum[k] += v[k];
        }
    }
}

// A warp sums the few places of most ids; the whole block comes together for the frequent ones.
template <int N>
DEVICE void backward(const T* __restrict__ dy, const u32* __restrict__ ends, const u32* __restrict__ order,
                     T* __restrict__ dtable, i64 vocab, i64 c, int accumulate) {
    const i64 column = (static_cast<i64>(blockIdx.y) * 32 + threadIdx.x) * N;
    const bool inside = column < c;
    dy += column, dtable += column;
    const auto finish = [&](i64 id, float(&sum)[N]) {
        if (accumulate) {
            float old[N];
            load(dtable + id * c, old);
            for (int k = 0; k < N; ++k) sum[k] += old[k];
        }
        store(dtable + id * c, sum);
    };
    // Frequent ids are often neighbours, so a block's ids stand far apart.
    const i64 id = blockIdx.x + static_cast<i64>(threadIdx.y) * gridDim.x;
    const u32 start = id == 0 || id >= vocab ? 0 : ends[id - 1], end = id < vocab ? ends[id] : 0;
    const bool few = id >= vocab || end - start <= SHORT;
    if (few && id < vocab && !(accumulate && start == end)) {
        float sum[N] = {};
        add_places(dy, order, start, end, 1, c, inside, sum);
        if (inside) finish(id, sum);
    }
    if (!__syncthreads_or(!few)) return;
    for (i64 id = blockIdx.x; id < vocab; id += gridDim.x) {
        const u32 start = id == 0 ? 0 : ends[id - 1], end = ends[id];
        if (end - start <= SHORT) continue;
        float sum[N] = {};
        add_places(dy, order, start + threadIdx.y, end, ROWS, c, inside, sum);
        sum_over_y(sum);
        if (inside && threadIdx.y == 0) finish(id, sum);
    }
}

KERNEL(256) embedding_backward(const T* dy, const u32* ends, const u32* order, T* dtable, i64 vocab, i64 c,
                               int accumulate) {
    if (c % LANES == 0)
        backward<LANES>(dy, ends, order, dtable, vocab, c, accumulate);
    else
        backward<1>(dy, ends, order, dtable, vocab, c, accumulate);
}
