// The instructions around bf16 products on the tensor cores, for compute capability 8.0 and newer: operands come from shared
// memory to registers as 8 x 8 matrices, and are multiplied with f32 sums.

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
