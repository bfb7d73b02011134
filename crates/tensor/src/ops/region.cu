// Rectangles of pixels, out of a batch of images and back into it.
//
// x: T [batch, h, w, c]; part: T [lines, run], a line for each row of the rectangle in each image. Line l lies in x from
// l / rows image + l % rows row + first on.
//
// region_take(x, part, lines, rows, run, image, row, first, c): out of x.
// region_put(part, x, ..), region_add(part, x, ..): into x, or onto what is there.
//   N = LANES (4 f32, 8 bf16) if c divides by it, else 1; tx = the smallest power of two that is not below run / N, at
//   most 32. grid ceil(lines / (256 / tx)), block (tx, 256 / tx).

// Calls body(place in x, place in the part) for each group of N elements of this thread.
template <int N, class Body>
DEVICE void for_line(i64 lines, i64 rows, i64 run, i64 image, i64 row, i64 first, Body body) {
    const i64 line = row_in_grid();
    if (line >= lines) return;
    const i64 start = line / rows * image + line % rows * row + first;
    for (i64 i = threadIdx.x * N; i < run; i += blockDim.x * N) body(start + i, line * run + i);
}

template <int N>
DEVICE void take(const T* x, T* part, i64 lines, i64 rows, i64 run, i64 image, i64 row, i64 first) {
    for_line<N>(lines, rows, run, image, row, first, [&](i64 at, i64 own) {
        float v[N];
        load(x + at, v);
        store(part + own, v);
    });
}

template <int N, bool ADD>
DEVICE void merge(const T* part, T* x, i64 lines, i64 rows, i64 run, i64 image, i64 row, i64 first) {
    for_line<N>(lines, rows, run, image, row, first, [&](i64 at, i64 own) {
        float v[N];
        load(part + own, v);
        if constexpr (ADD) {
            float before[N];
            load(x + at, before);
            for (int k = 0; k < N; ++k) v[k] += before[k];
        }
        store(x + at, v);
    });
}

KERNEL(256) region_take(const T* x, T* part, i64 lines, i64 rows, i64 run, i64 image, i64 row, i64 first, i64 c) {
    if (c % LANES == 0)
        take<LANES>(x, part, lines, rows, run, image, row, first);
    else
        take<1>(x, part, lines, rows, run, image, row, first);
}

KERNEL(256) region_put(const T* part, T* x, i64 lines, i64 rows, i64 run, i64 image, i64 row, i64 first, i64 c) {
    if (c % LANES == 0)
        merge<LANES, false>(part, x, lines, rows, run, image, row, first);
    else
        merge<1, false>(part, x, lines, rows, run, image, row, first);
}

KERNEL(256) region_add(const T* part, T* x, i64 lines, i64 rows, i64 run, i64 image, i64 row, i64 first, i64 c) {
    if (c % LANES == 0)
        merge<LANES, true>(part, x, lines, rows, run, image, row, first);
    else
        merge<1, true>(part, x, lines, rows, run, image, row, first);
}
