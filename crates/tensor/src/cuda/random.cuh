// Element `counter` of stream `key`: a pure function of both.

// "Squares" (Widynski 2020), bit for bit that of random.rs.
DEVICE u32 random_bits(u64 key, u64 counter) {
    const u64 y = counter * key, z = y + key;
    u64 x = y;
    x = x * x + y, x = (x << 32) | (x >> 32);
    x = x * x + z, x = (x << 32) | (x >> 32);
    x = x * x + y, x = (x << 32) | (x >> 32);
    return static_cast<u32>((x * x + z) >> 32);
}

// The index of element i of some runs (index_runs.rs). table [runs, 2]: where each begins here, and the index of its first element.
DEVICE u64 run_index(const u64* __restrict__ table, i64 runs, i64 i) {
    // The last run that begins at or before i.
    i64 run = 0, end = runs;
    while (end - run > 1) {
        const i64 middle = (run + end) / 2;
        if (i64(table[2 * middle]) <= i) run = middle;
        else end = middle;
    }
    return table[2 * run + 1] + (u64(i) - table[2 * run]);
}
