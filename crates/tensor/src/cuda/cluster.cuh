// Blocks that reach into each other's shared memory, for compute capability 9.0 and newer. copies.cuh stands before this file.

// All threads of all blocks of a cluster arrive, and whoever waits goes on when they have.
DEVICE void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes where the cluster's first block has what is `own` here. That block must have begun, and be there still.
DEVICE void to_first_block(float* own, float value) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(shared_address(own)));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
