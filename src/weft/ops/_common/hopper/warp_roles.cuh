// Roles of warps: a block is several warp groups of 128 threads; group 0 produces, the others consume.
#pragma once
#include "ptx.cuh"

namespace hopper {

constexpr int GROUP_THREADS = 128;

// The group of this thread. The shuffle tells the compiler that it is the same in the whole warp.
__device__ __forceinline__ int group_index() {
  return __shfl_sync(0xffffffff, (int)threadIdx.x / GROUP_THREADS, 0);
}

// True in the one thread that issues copies: of the first warp of its group.
__device__ __forceinline__ bool is_issuer() {
  return __shfl_sync(0xffffffff, (int)threadIdx.x % GROUP_THREADS / 32, 0) == 0 && elect_one();
}

// True in the one thread of a group that issues its stores.
__device__ __forceinline__ bool is_storer() { return threadIdx.x % GROUP_THREADS == 0; }

}  // namespace hopper
