// Some columns of rows, out of a wider matrix or into it.
//
// columns_copy(x, y, rows, columns, from_width, first, to_width, to): T [rows, from_width], columns first .. first +
//   columns, to T [rows, to_width], columns to .. to + columns. N = LANES (4 f32, 8 bf16) if all five numbers divide by
//   it, else 1; tx = the smallest power of two that is not below columns / N, at most 32. grid
//   ceil(rows / (256 / tx)), block (tx, 256 / tx).

template <int N>
DEVICE void copy(const T* __restrict__ x, T* __restrict__ y, i64 rows, i64 columns, i64 from_width, i64 to_width) {
    const i64 row = row_in_grid();
    if (row >= rows) return;
    for (i64 i = threadIdx.x * N; i < columns; i += blockDim.x * N) {
        float v[N];
        load(x + row * from_width + i, v);
        store(y + row * to_width + i, v);
    }
}

KERNEL(256) columns_copy(const T* x, T* y, i64 rows, i64 columns, i64 from_width, i64 first, i64 to_width, i64 to) {
    if (columns % LANES == 0 && from_width % LANES == 0 && first % LANES == 0 && to_width % LANES == 0 && to % LANES == 0)
        copy<LANES>(x + first, y + to, rows, columns, from_width, to_width);
    else
        copy<1>(x + first, y + to, rows, columns, from_width, to_width);
}
