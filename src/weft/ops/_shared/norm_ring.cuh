// Rows on their way: each team has a ring of STAGES rows in shared memory, brought by the bulk copy
// engine (compute capability 9.0 and later), so that loads never wait for arithmetic.
#pragma once
#include "bulk.cuh"
#include "norm_merge.cuh"

#ifndef STAGES
#define STAGES 3
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif

#if __CUDA_ARCH__ >= 900

// Which rows a team takes, of 2^30 at most: the first, and every so many after it.
__device__ __forceinline__ int first_row() {
  return blockIdx.x / CLUSTER * TEAMS + threadIdx.x / TEAM;
}
__device__ __forceinline__ int row_step() { return gridDim.x / CLUSTER * TEAMS; }

// A team's ring over TENSORS tensors, whose slice of row r is `bytes` from from[t] + r stride[t].
template <int TENSORS> struct Ring {
  const WEFT_T* from[TENSORS];
  index_t stride[TENSORS];
  int rows;
  int bytes;
  unsigned char* base;
  unsigned long long* arrived;  // STAGES barriers
  int stage = 0;
  unsigned phase = 0;

  __device__ __forceinline__ bool leads() const { return threadIdx.x % TEAM == 0; }

  __device__ __forceinline__ void ask(int row, int to) {
    if (row >= rows || !bytes) return;
    unsigned char* at = base + to * TENSORS * bytes;
    expect(arrived + to, TENSORS * bytes);
#pragma unroll
    for (int t = 0; t < TENSORS; ++t)
      copy(at + t * bytes, from[t] + row * stride[t], bytes, arrived + to);
  }

  // The barriers made ready, the first rows asked for, and no block written to before it runs.
  __device__ __forceinline__ void start() {
    if (leads())
      for (int k = 0; k < STAGES; ++k) prepare(arrived + k);
#if CLUSTER > 1
    cluster_barrier();
#else
    team_barrier();
#endif
    if (leads())
      for (int k = 0; k < STAGES; ++k) ask(first_row() + k * row_step(), k);
  }

  // Tensor t of the row whose turn it is, once it has come.
  __device__ __forceinline__ void await() {
    if (bytes) wait(arrived + stage, phase);
  }
  __device__ __forceinline__ const Pack* held(int t) const {
    return reinterpret_cast<const Pack*>(base + (stage * TENSORS + t) * bytes);
  }

  // All of the team have read the row: the row STAGES turns on may come in its place.
  __device__ __forceinline__ void advance(int row) {
    if (leads()) ask(row + STAGES * row_step(), stage);
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

#endif
