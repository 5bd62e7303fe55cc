// Hopper's copy engine and clusters (compute capability 9.0 and later). Source: NVIDIA's PTX ISA.
//
// Bulk copies: one thread issues a copy of many bytes from global to shared memory; the copy engine (the
// asynchronous proxy) counts the bytes on an mbarrier as they arrive.
// Clusters: the cluster barrier, and stores into the shared memory of another block (distributed shared
// memory).
#pragma once

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned smem_address(const void* shared) {
  return (unsigned)__cvta_generic_to_shared(shared);
}

// Initialises `count` mbarriers, whose phases complete after `arrivals` arrivals: by default one, that of
// mbarrier_expect_bytes, and all bytes that it announces. The first fence makes the barriers visible to the
// cluster, the second to the asynchronous proxy, before any copy counts on them.
__device__ __forceinline__ void init_mbarriers(unsigned long long* mbarrier, int count = 1,
                                               int arrivals = 1) {
  for (int k = 0; k < count; ++k)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(mbarrier + k)), "r"(arrivals)
                 : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives at the mbarrier. What this thread wrote before is visible to the threads that wait for the phase.
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(mbarrier)) : "memory");
}

// Arrives at the mbarrier and announces `bytes` for its current phase. One thread calls it in each phase.
__device__ __forceinline__ void mbarrier_expect_bytes(unsigned long long* mbarrier, int bytes) {
  // The arrival comes before the copies are issued, so that the phase cannot complete without their bytes.
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(mbarrier)),
               "r"(bytes)
               : "memory");
}

// Issues a copy from global memory to this block's shared memory, counted on `mbarrier`. `to`, `from` and
// `bytes` are multiples of 16 (a rule of the instruction); bytes > 0.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, int bytes,
                                          unsigned long long* mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(mbarrier))
      : "memory");
}

// Waits until the phase with this parity (0 for the first, then alternating) has completed. try_wait may
// return early with false, hence the loop.
__device__ __forceinline__ void mbarrier_wait(unsigned long long* mbarrier, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_address(mbarrier)), "r"(parity)
        : "memory");
}

// ---- Clusters

// The .aligned forms need a converged warp, hence __syncwarp before each. arrive releases this thread's
// earlier writes; wait acquires those of all threads of the cluster.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Arrives without a release. It suffices where the other blocks need to see only initialised mbarriers, which
// have a fence of their own (init_mbarriers): no thread then waits for its pending memory operations.
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

// Stores `value` in block `rank` of the cluster, at the address that `own` has in this block. The reader
// sees it after the next cluster barrier.
__device__ __forceinline__ void store_to_block(int rank, float* own, float value) {
  const unsigned local = (unsigned)__cvta_generic_to_shared(own);
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}

// The same as an asynchronous store that counts 4 bytes on that block's `mbarrier`, through which the reader
// sees the value. A cluster barrier would wait until all earlier stores of its threads are visible to the
// whole device; this waits for the 4 bytes alone.
__device__ __forceinline__ void send_to_block(int rank, float* own, float value,
                                              unsigned long long* mbarrier) {
  unsigned remote, remote_mbarrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote) : "r"((unsigned)__cvta_generic_to_shared(own)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote_mbarrier) : "r"((unsigned)__cvta_generic_to_shared(mbarrier)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               :
               : "r"(remote), "r"(__float_as_uint(value)), "r"(remote_mbarrier)
               : "memory");
}

#endif
