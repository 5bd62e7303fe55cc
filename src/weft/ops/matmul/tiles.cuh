// What both matmul programs use: the order of tiles, and asynchronous copies into shared memory.
#pragma once
#include "numeric.cuh"

struct Place { index_t row, column; };

// Where tile number `tile` of c lies, in tiles: down bands of GROUP rows of tiles, each band column
// by column, so that blocks that run together share rows of a and columns of b in the L2 cache.
__device__ __forceinline__ Place tile_place(int tile, int row_tiles, int column_tiles) {
  constexpr int GROUP = 8;
  const int in_band = GROUP * column_tiles, band = tile / in_band, within = tile % in_band;
  const int height = min(row_tiles - band * GROUP, GROUP);
  return {band * GROUP + within % height, within / height};
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copy `valid` bytes (0 to SIZE) and fill the rest of SIZE bytes with 0. Both ends aligned to SIZE.
template <int SIZE>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, int valid) {
  if constexpr (SIZE == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
}

__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most PENDING of this thread's committed groups are still on their way.
template <int PENDING> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
