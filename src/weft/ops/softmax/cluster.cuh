// A row over the CLUSTER blocks of a thread-block cluster (compute capability 9.0 and later).
#pragma once
#include "softmax.cuh"

// What this block has of its row, in elements from the row's start, and in accesses.
struct Slice {
  index_t row;
  index_t from;
  int accesses;
};

__device__ __forceinline__ Slice slice_of(index_t columns) {
  const int all = columns / N, each = (all + CLUSTER - 1) / CLUSTER;
  const int from = min((int)(blockIdx.x % CLUSTER) * each, all);
  return {blockIdx.x / CLUSTER, (index_t)from * N, min(each, all - from)};
}

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Every block's value, one a lane (`nothing` past CLUSTER), in every warp of every block. The
// caller has arrived once before: no block's memory is written before that block runs; and since
// all pass the second barrier after writing, none ends while it may still be written to.
template <typename T>
__device__ __forceinline__ T cluster_gather(T mine, T* peers, T nothing) {
  cluster_wait();
  if (threadIdx.x < CLUSTER) {
    const unsigned own = (unsigned)__cvta_generic_to_shared(peers + blockIdx.x % CLUSTER);
    unsigned theirs;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own), "r"(threadIdx.x));
    const float* words = reinterpret_cast<const float*>(&mine);
#pragma unroll
    for (int k = 0; k < (int)(sizeof(T) / 4); ++k)
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(theirs + 4 * k), "f"(words[k])
                   : "memory");
  }
  cluster_arrive();
  cluster_wait();
  const int lane = threadIdx.x % 32;
  return lane < CLUSTER ? peers[lane] : nothing;
}

#endif
