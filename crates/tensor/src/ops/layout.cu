// Moves without arithmetic.
//
// layout_transpose(x, y, batch, rows, columns): T [batch, rows, columns] to [batch, columns, rows], in squares of 32
//   through shared memory. flatten: rows = h w, columns = c; unflatten: rows = c, columns = h w.
//   grid (ceil(columns / 32), ceil(rows / 32), min(batch, 65535)), block (32, 8). ceil(rows / 32) <= 65535.
// layout_resize(x, y, rows, c, channels): T [rows, c] to [rows, channels], cropped or with zeros appended:
//   crop_channels, pad_channels. N = LANES (4 f32, 8 bf16) if channels divide by it, else 1; tx = the smallest power of
//   two that is not below channels / N, at most 32. grid ceil(rows / (256 / tx)), block (tx, 256 / tx). Rows that do not
//   begin at 16 bytes, as those of three channels, are read number by number.

KERNEL(256) layout_transpose(const T* __restrict__ x, T* __restrict__ y, i64 batch, i64 rows, i64 columns) {
    __shared__ T square[32][33];
    const i64 i0 = static_cast<i64>(blockIdx.y) * 32, j0 = static_cast<i64>(blockIdx.x) * 32;
    for (i64 n = blockIdx.z; n < batch; n += gridDim.z) {
        const T* const from = x + n * rows * columns;
        T* const to = y + n * rows * columns;
        for (u32 k = threadIdx.y; k < 32; k += 8)
            if (i0 + k < rows && j0 + threadIdx.x < columns)
                square[k][threadIdx.x] = from[(i0 + k) * columns + j0 + threadIdx.x];
        __syncthreads();
        for (u32 k = threadIdx.y; k < 32; k += 8)
            if (j0 + k < columns && i0 + threadIdx.x < rows)
                to[(j0 + k) * rows + i0 + threadIdx.x] = square[threadIdx.x][k];
        __syncthreads();
    }
}

template <int N, bool APART>
DEVICE void resize(const T* __restrict__ x, T* __restrict__ y, i64 rows, i64 c, i64 channels) {
    const i64 row = row_in_grid();
    if (row >= rows) return;
    for (i64 i = threadIdx.x * N; i < channels; i += blockDim.x * N) {
        float v[N] = {};
        if constexpr (APART) {
            for (int k = 0; k < N; ++k)
                if (i + k < c) v[k] = to_f32(x[row * c + i + k]);
        } else if (i < c) {
            load(x + row * c + i, v);
        }
        store(y + row * channels + i, v);
    }
}

KERNEL(256) layout_resize(const T* x, T* y, i64 rows, i64 c, i64 channels) {
    if (c % LANES == 0 && channels % LANES == 0)
        resize<LANES, false>(x, y, rows, c, channels);
    else if (channels % LANES == 0)
        resize<LANES, true>(x, y, rows, c, channels);
    else
        resize<1, false>(x, y, rows, c, channels);
}
