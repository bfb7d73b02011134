// Copies to shared memory that do not wait and take no registers, for compute capability 8.0 and newer.

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
