// Shared by both matmul programs: the order of tiles, and asynchronous copies into shared memory.
#pragma once
#include "numeric.cuh"

struct TilePosition { index_t row, column; };  // in tiles

// The position of tile number `tile` of c. The order is bands of GROUP rows of tiles, each column by
// column, so that blocks that run at the same time share rows of a and columns of b in the L2 cache.
__device__ __forceinline__ TilePosition tile_position(int tile, int row_tiles, int column_tiles) {
  // With 132 SMs and one tile each, 8 rows of tiles make the tiles in flight nearly square: 8 + 17 row and
  // column blocks are read for 132 tiles, instead of 1 + 132 in row order.
  constexpr int GROUP = 8;
  const int in_band = GROUP * column_tiles, band = tile / in_band, within = tile % in_band;
  const int height = min(row_tiles - band * GROUP, GROUP);
  return {band * GROUP + within % height, within / height};
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copy `valid` bytes (0 to SIZE) and fill the rest of SIZE bytes with 0. Both addresses are aligned to SIZE.
template <int SIZE>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, int valid) {
  // .cg bypasses the L1 and exists for 16 bytes only; smaller copies go through the L1 (.ca).
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

// Wait until at most PENDING of this thread's committed groups are still in flight.
template <int PENDING> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
