// A row over the CLUSTER blocks of a thread-block cluster (compute capability 9.0 and later).
#pragma once
#include "bulk.cuh"
#include "clusters.cuh"
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

// The maximum of an access; bf16 two at a time, as they lie.
__device__ __forceinline__ float wide_max(const Pack& p) {
#ifdef PAIRS
  __nv_bfloat162 top = reinterpret_cast<const __nv_bfloat162&>(p.word[0]);
#pragma unroll
  for (int k = 1; k < WORDS; ++k)
    top = __hmax2(top, reinterpret_cast<const __nv_bfloat162&>(p.word[k]));
  return fmaxf(__low2float(top), __high2float(top));
#else
  return pack_max(p);
#endif
}

#if __CUDA_ARCH__ >= 900

// Every block's value, one a lane (`nothing` past CLUSTER), in every warp of every block, counted
// on the mbarrier `met`, its first phase. The caller has arrived once before: no block's memory is
// written before that block runs; and each waits for all that it is sent, so that none ends while
// it may still be written to.
template <typename T>
__device__ __forceinline__ T cluster_gather(T mine, T* peers, T nothing, unsigned long long* met) {
  cluster_wait();
  if (threadIdx.x == 0) expect(met, CLUSTER * sizeof(T));
  if (threadIdx.x < CLUSTER) {
    float words[sizeof(T) / 4];
    memcpy(words, &mine, sizeof(T));
    float* own = reinterpret_cast<float*>(peers + blockIdx.x % CLUSTER);
#pragma unroll
    for (int k = 0; k < (int)(sizeof(T) / 4); ++k) send(threadIdx.x, own + k, words[k], met);
  }
  wait(met, 0);
  __syncwarp();
  const int lane = threadIdx.x % 32;
  return lane < CLUSTER ? peers[lane] : nothing;
}

#endif
