// Shared by steps 3 to 5: the scan of a block's tile by warp shuffles, ITEMS adjacent elements in each
// thread.
#pragma once
#include "numeric.cuh"

#ifndef THREADS
#define THREADS 256
#endif

constexpr int ITEMS = 4;
constexpr index_t TILE = THREADS * ITEMS;
constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;

// Loads a thread's elements of a tile; elements past the row's end are 0.
__device__ __forceinline__ void load_items(float (&v)[ITEMS], const WEFT_T* row, index_t tile, index_t n) {
  const index_t first = tile * TILE + threadIdx.x * ITEMS;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) v[j] = first + j < n ? to_float(row[first + j]) : 0.0f;
}

// Turns each element into the sum of the tile's elements up to it; returns the tile's sum in every thread.
// `totals` is shared memory for one float of each warp, and is used once.
__device__ __forceinline__ float scan_block(float (&v)[ITEMS], float* totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 1; j < ITEMS; ++j) v[j] += v[j - 1];
  float total = v[ITEMS - 1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float left = __shfl_up_sync(ALL, total, step, 32);
    if (lane >= step) total += left;
  }
  const float left = __shfl_up_sync(ALL, total, 1, 32);
  if (lane == 31) totals[warp] = total;
  __syncthreads();
  float before = lane ? left : 0.0f, sum = 0.0f, warps_before = 0.0f;
  for (int k = 0; k < WARPS; ++k) {
    if (k == warp) warps_before = sum;
    sum += totals[k];
  }
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) v[j] += warps_before + before;
  return sum;
}

__device__ __forceinline__ void store_items(const float (&v)[ITEMS], float before, WEFT_T* row, index_t tile,
                                            index_t n) {
  const index_t first = tile * TILE + threadIdx.x * ITEMS;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j)
    if (first + j < n) row[first + j] = from_float<WEFT_T>(before + v[j]);
}
