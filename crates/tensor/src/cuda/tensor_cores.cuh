// The instructions around bf16 products on the tensor cores, for compute capability 8.0 and newer: operands come to shared
// memory by copies that do not wait, from there to registers as 8 x 8 matrices, and are multiplied with f32 sums.

DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// 16 bytes to shared memory, or 16 zeros; the source must be readable either way.
DEVICE void copy_16(u32 to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

DEVICE void copy_8(u32 to, const void* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(real ? 8 : 0) : "memory");
}

// The copies since the last call become a group.
DEVICE void copies_close() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last LEFT groups are there.
template <int LEFT>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// The same, each turned over on the way.
DEVICE void load_matrices_transposed(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// sum [16, 8] += left [16, 16] right [16, 8].
DEVICE void multiply(float (&sum)[4], const u32 (&left)[4], u32 right0, u32 right1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}
