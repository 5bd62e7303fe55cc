// What both steps of the order of tokens share: an owner's rows, sums over a block, stable places.
#pragma once
#include "rows.cuh"

#ifndef OWNERS
#define OWNERS 16
#endif
constexpr int ORDER_WARPS = OWNERS, OWN = ORDER_WARPS * 32;
constexpr int OFFSET = 21;  // bits of a token's place in its block's share, beside its row's ten
static_assert(OWN <= 1 << (31 - OFFSET), "a row and a place in one int, whose sign is free");

// Exclusive sum over the block's threads; `whole` gets the block's total.
template <int W>
__device__ __forceinline__ int before(int mine, int* scratch, int& whole) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  int sums = lane < W ? scratch[lane] : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, sums, step);
    if (lane >= step) sums += other;
  }
  whole = __shfl_sync(ALL, sums, 31);
  const int earlier = __shfl_sync(ALL, sums, warp ? warp - 1 : 0);
  __syncthreads();
  return (warp ? earlier : 0) + upto - mine;
}

// `to` gets what up to 32 lanes of a warp have, each of a row or of none (-1), where the warp's own
// `next` of that row says, in the order of lanes.
__device__ __forceinline__ void put(int* to, int* next, int row, int what) {
  const unsigned equal = __match_any_sync(ALL, row);
  const int rank = __popc(equal & ((1u << threadIdx.x % 32) - 1));
  const int at = row < 0 ? 0 : next[row];
  __syncwarp();
  if (row >= 0 && rank == 0) next[row] = at + __popc(equal);
  __syncwarp();
  if (row >= 0) to[at + rank] = what;
}
