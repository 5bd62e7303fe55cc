// The blocks of a thread-block cluster (compute capability 9.0 and later): where they meet, and how
// they write into each other's shared memory.
#pragma once

#if __CUDA_ARCH__ >= 900

// Every thread of the cluster arrives, and later waits until all have.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same where barriers made ready are all that others must see (their fence was
// `mbarrier_init`'s): no thread waits for what it has asked of memory.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

// Writes `value` where block `rank` of the cluster has what this block has at `own`.
__device__ __forceinline__ void write_to(int rank, float* own, float value) {
  const unsigned here = (unsigned)__cvta_generic_to_shared(own);
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

// The same, and counts 4 bytes on that block's mbarrier `arrived`, by which it sees the value. The
// cluster's barrier would first wait until all that its threads have stored is seen by the device.
__device__ __forceinline__ void send(int rank, float* own, float value,
                                     unsigned long long* arrived) {
  unsigned there, count;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(own)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(count) : "r"((unsigned)__cvta_generic_to_shared(arrived)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               :
               : "r"(there), "r"(__float_as_uint(value)), "r"(count)
               : "memory");
}

#endif
