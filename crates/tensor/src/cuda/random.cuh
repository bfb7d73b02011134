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
