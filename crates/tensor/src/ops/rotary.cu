// Rotations of queries and keys by their positions; the formulas are those of rotary.rs.
//
// rotary_turn(x, table, first, rows, t, rotated, heads, d, sense): in place.
//   x: T [rows, heads, d], of which the first `rotated` heads are turned; row r stands at position r % t, plus
//   *first (u32) unless it is null. table: f32 [positions, d]: cosines, then sines. sense: 1 or -1.
//   N = LANES if d / 2 divides by it, else 1. A thread has N pairs: grid ceil(rows rotated d / 2 / N / 256), block 256.

template <int N>
DEVICE void turn(T* __restrict__ x, const float* __restrict__ table, const u32* first, i64 rows, u32 t, u32 rotated,
                 u32 heads, u32 d, float sense) {
    const u32 half = d / 2, groups = half / N, of_row = rotated * groups;
    const i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 row = at / of_row;
    if (row >= rows) return;
    const u32 rest = static_cast<u32>(at - row * of_row), head = rest / groups, i = rest % groups * N;
    const i64 position = (first ? *first : 0u) + static_cast<u32>(row % t);
    T* pair = x + (row * heads + head) * d + i;
    float a[N], b[N], cosine[N], sine[N];
    load(pair, a);
    load(pair + half, b);
    load(table + position * d + i, cosine);
    load(table + position * d + half + i, sine);
    for (int k = 0; k < N; ++k) {
        const float u = a[k], v = b[k], s = sense * sine[k];
        a[k] = u * cosine[k] - v * s;
        b[k] = v * cosine[k] + u * s;
    }
    store(pair, a);
    store(pair + half, b);
}

KERNEL(256) rotary_turn(T* x, const float* table, const u32* first, i64 rows, int t, int rotated, int heads, int d,
                        float sense) {
    if (d / 2 % LANES == 0)
        turn<LANES>(x, table, first, rows, t, rotated, heads, d, sense);
    else
        turn<1>(x, table, first, rows, t, rotated, heads, d, sense);
}
