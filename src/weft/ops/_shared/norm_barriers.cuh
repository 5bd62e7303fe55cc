// Where the threads that share a row meet: a team of a block, or the blocks of a cluster.
#pragma once
#include "clusters.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef TEAM
#define TEAM THREADS
#endif

// The TEAM threads of each team wait for one another; teams do not.
__device__ __forceinline__ void team_barrier() {
  if (TEAM == THREADS) {
    __syncthreads();
  } else if (TEAM == 32) {
    __syncwarp();
  } else {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / TEAM), "n"(TEAM) : "memory");
  }
}
