// Norms of heads of queries and keys, and the rotation behind them; the formulas are those of qk_norm.rs.
//
// x, y, dx: T [rows, heads + 2 kv_heads, d], d even and at most 256; row r stands at position r % t, plus *first (u32)
// unless it is null. q, k: the scales [d], f32 where `wide`, else T; table: f32 [positions, d], cosines and then
// sines, or null for no rotation; rstd: f32 [rows, heads + kv_heads]. Blocks are (32, 8): a lane has pairs
// i, i + d / 2 for i = lane, lane + 32, ..
//
// qk_norm_forward(x, y, rstd, q, k, wide, table, first, rows, t, heads, kv_heads, d, eps):
//   a warp for each head, values included. grid ceil(rows (heads + 2 kv_heads) / 8).
// qk_norm_backward(dx, x, rstd, partial, q, k, wide, table, first, rows, t, heads, kv_heads, d, chunk): dx is dy before;
//   a warp for each chunk of rows, whose terms of both scales' gradients are its row of partial: f32 [warps, 2 d].
//   grid ceil(ceil(rows / chunk) / 8).

enum : int { PAIRS = 4 };

struct Turn {
    float cosine[PAIRS], sine[PAIRS];

    DEVICE Turn(const float* table, i64 position, int d) {
        for (int j = 0; j < PAIRS; ++j) {
            const int i = threadIdx.x + j * WARP;
            const bool there = table && i < d / 2;
            cosine[j] = there ? table[position * d + i] : 1.0f;
            sine[j] = there ? table[position * d + d / 2 + i] : 0.0f;
        }
    }
};

DEVICE float weight(const void* at, int wide, int i) {
    return wide ? static_cast<const float*>(at)[i] : to_f32(static_cast<const T*>(at)[i]);
}

KERNEL(256) qk_norm_forward(const T* x, T* y, float* rstd, const void* q, const void* k, int wide, const float* table,
                            const u32* first, i64 rows, int t, int heads, int kv_heads, int d, float eps) {
    const i64 at = row_in_grid();
    const int all = heads + 2 * kv_heads, normalised = heads + kv_heads, half = d / 2;
    const i64 row = at / all;
    if (row >= rows) return;
    const int head = static_cast<int>(at - row * all);
    x += at * d, y += at * d;
    if (head >= normalised) {
        for (int i = threadIdx.x; i < d; i += WARP) y[i] = x[i];
        return;
    }
    const Turn turn(table, (first ? *first : 0u) + row % t, d);
    const void* scale = head < heads ? q : k;
    float a[PAIRS], b[PAIRS], squares = 0.0f;
    for (int j = 0; j < PAIRS; ++j) {
        const int i = threadIdx.x + j * WARP;
        a[j] = i < half ? to_f32(x[i]) : 0.0f;
        b[j] = i < half ? to_f32(x[i + half]) : 0.0f;
        squares += a[j] * a[j] + b[j] * b[j];
    }
    const float r = 1.0f / sqrtf(warp_sum(squares) / d + eps);
    for (int j = 0; j < PAIRS; ++j) {
        const int i = threadIdx.x + j * WARP;
        if (i >= half) break;
        const float u = a[j] * r * weight(scale, wide, i), v = b[j] * r * weight(scale, wide, i + half);
        y[i] = from_f32<T>(u * turn.cosine[j] - v * turn.sine[j]);
        y[i + half] = from_f32<T>(v * turn.cosine[j] + u * turn.sine[j]);
    }
    if (threadIdx.x == 0) rstd[row * normalised + head] = r;
}

KERNEL(256) qk_norm_backward(T* dx, const T* x, const float* rstd, float* partial, const void* q, const void* k,
                             int wide, const float* table, const u32* first, i64 rows, int t, int heads, int kv_heads,
                             int d, i64 chunk) {
    const i64 warp = row_in_grid(), begin = warp * chunk, end = begin + chunk < rows ? begin + chunk : rows;
    if (begin >= rows) return;
    const int all = heads + 2 * kv_heads, normalised = heads + kv_heads, half = d / 2;
    float sums[2][2][PAIRS] = {};
    for (i64 row = begin; row < end; ++row) {
        const Turn turn(table, (first ? *first : 0u) + row % t, d);
        for (int which = 0; which < 2; ++which) {
            const void* scale = which ? k : q;
            for (int head = which ? heads : 0; head < (which ? normalised : heads); ++head) {
                const i64 at = (row * all + head) * d;
                const float r = rstd[row * normalised + head];
                float a[PAIRS], b[PAIRS], u[PAIRS], v[PAIRS], mean = 0.0f;
                for (int j = 0; j < PAIRS; ++j) {
                    const int i = threadIdx.x + j * WARP;
                    a[j] = b[j] = u[j] = v[j] = 0.0f;
                    if (i >= half) continue;
                    const float da = to_f32(dx[at + i]), db = to_f32(dx[at + i + half]);
                    u[j] = da * turn.cosine[j] + db * turn.sine[j];
                    v[j] = db * turn.cosine[j] - da * turn.sine[j];
                    a[j] = to_f32(x[at + i]) * r;
                    b[j] = to_f32(x[at + i + half]) * r;
                    sums[which][0][j] += u[j] * a[j];
                    sums[which][1][j] += v[j] * b[j];
                    u[j] *= weight(scale, wide, i);
                    v[j] *= weight(scale, wide, i + half);
                    mean += u[j] * a[j] + v[j] * b[j];
                }
                mean = warp_sum(mean) / d;
                for (int j = 0; j < PAIRS; ++j) {
                    const int i = threadIdx.x + j * WARP;
                    if (i >= half) break;
                    dx[at + i] = from_f32<T>(r * (u[j] - a[j] * mean));
                    dx[at + i + half] = from_f32<T>(r * (v[j] - b[j] * mean));
                }
            }
        }
    }
    for (int which = 0; which < 2; ++which)
        for (int j = 0; j < PAIRS; ++j) {
            const int i = threadIdx.x + j * WARP;
            if (i >= half) break;
            partial[(warp * 2 + which) * d + i] = sums[which][0][j];
            partial[(warp * 2 + which) * d + half + i] = sums[which][1][j];
        }
}
