// The way back through layer norm and RMS norm to their input: how both walk over a row. What they do with it is their
// own, a struct `Row`:
//
//   NUMBERS             how many numbers are kept of a row, and how many weights a channel has
//   Row(at)             from a row's numbers
//   h(x)                x as the norm leaves it, before the weights
//   y(h, scale, shift)  the forward pass's result, with its bits; the shift is 0 where the norm has none
//   add(d, h)           adds up what dx must know of the whole row, with d = dy scale
//   finish(c)           makes means of it, over all threads of the row
//   dx(d, h)            the gradient
//
// Where REMAKE, y is made again, and the residual added unless it is null.

template <class Row, int N, bool REMAKE>
DEVICE void backward_input(const T* dy, const T* x, Weights scale, Weights shift, const float* statistics,
                           const T* residual, T* dx, T* y, i64 rows, i64 c) {
    const i64 at = row_in_grid();
    if (at >= rows) return;
    const bool add = REMAKE && residual;
    dy += at * c, x += at * c, dx += at * c;
    if (REMAKE) y += at * c;
    if (add) residual += at * c;
    Row row(statistics + at * Row::NUMBERS);

    Raw<T, N> held_dy[HELD], held_x[HELD], held_r[HELD];
    const auto again = [&](i64 i, int k, float(&d)[N], float(&h)[N], float(&a)[N]) {
        if (k < HELD)
            held_dy[k].get(d), held_x[k].get(h);
        else
            load(dy + i, d), load(x + i, h);
        scale.get(i, a);
        for (int j = 0; j < N; ++j) d[j] *= a[j], h[j] = row.h(h[j]);
    };
    for_row<N>(c, [&](i64 i, int k) {
        if (k < HELD) {
            held_dy[k].read(dy + i);
            held_x[k].read(x + i);
            if (add) held_r[k].read(residual + i);
        }
    });
    for_row<N>(c, [&](i64 i, int k) {
        float d[N], h[N], a[N];
        again(i, k, d, h, a);
        for (int j = 0; j < N; ++j) row.add(d[j], h[j]);
    });
    row.finish(c);
    for_row<N>(c, [&](i64 i, int k) {
        float d[N], h[N], a[N], r[N] = {};
        again(i, k, d, h, a);
        if (add && k < HELD) held_r[k].get(r);
        if (add && k == HELD) load(residual + i, r);
        for (int j = 0; j < N; ++j) {
            d[j] = row.dx(d[j], h[j]);
            if (add) d[j] += r[j];
        }
        store(dx + i, d);
        if (REMAKE) {
            float b[N] = {};
            if (Row::NUMBERS > 1) shift.get(i, b);
            for (int j = 0; j < N; ++j) h[j] = row.y(h[j], a[j], b[j]);
            store(y + i, h);
        }
    });
}
