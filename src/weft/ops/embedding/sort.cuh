// Device code that both kernels of the token sort share: rows of an owner, block prefix sums, stable scatter.
#pragma once
#include "row_access.cuh"

#ifndef OWNERS
#define OWNERS 16
#endif
constexpr int ORDER_WARPS = OWNERS, OWNER_ROWS = ORDER_WARPS * 32;
constexpr int OFFSET = 21;  // bits of a token's position in its block's share; the upper ten are its row
static_assert(OWNER_ROWS <= 1 << (31 - OFFSET), "a row and a position fit one int without its sign");

// Return the exclusive prefix sum over the block's threads; `whole` gets the block's total.
template <int W>
__device__ __forceinline__ int block_exclusive_sum(int mine, int* scratch, int& whole) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  // Second level: each warp repeats the scan of the W warp totals, which saves a barrier and a broadcast.
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  int sums = lane < W ? scratch[lane] : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, sums, step);
    if (lane >= step) sums += other;
  }
  whole = __shfl_sync(FULL_MASK, sums, 31);
  const int earlier = __shfl_sync(FULL_MASK, sums, warp ? warp - 1 : 0);
  // The caller may use `scratch` again at once.
  __syncthreads();
  return (warp ? earlier : 0) + inclusive - mine;
}

// Write the values of a warp's lanes to `to`, each at the next free offset of its row (-1: no row), in the
// order of the lanes. `next` has the warp's own offset for each row.
__device__ __forceinline__ void scatter_stable(int* to, int* next, int row, int what) {
  // Lanes with the same row share a mask; a lane's rank among them is the number of lower lanes in it. The
  // order of the lanes, and with it the result, does not depend on timing.
  const unsigned equal = __match_any_sync(FULL_MASK, row);
  const int rank = __popc(equal & ((1u << threadIdx.x % 32) - 1));
  // All lanes read the offset before the first lane of each row advances it: hence the barriers on both
  // sides.
  const int at = row < 0 ? 0 : next[row];
  __syncwarp();
  if (row >= 0 && rank == 0) next[row] = at + __popc(equal);
  __syncwarp();
  if (row >= 0) to[at + rank] = what;
}
