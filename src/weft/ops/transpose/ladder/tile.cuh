// Shared by steps 2 to 4: tiles of SIDE x SIDE elements, for blocks of SIDE x LINES threads.
#pragma once
#include "numeric.cuh"

constexpr int SIDE = 32, LINES = 8;

struct Tile { index_t batch, row, column; };  // its matrix, and its first row and column in x

__device__ __forceinline__ index_t tiles_along(index_t size) { return (size + SIDE - 1) / SIDE; }

__device__ __forceinline__ index_t count_tiles(index_t batches, index_t rows, index_t columns) {
  return batches * tiles_along(rows) * tiles_along(columns);
}

__device__ __forceinline__ Tile tile_of(index_t number, index_t rows, index_t columns) {
  const index_t across = tiles_along(columns), down = tiles_along(rows);
  return {number / (across * down), number / across % down * SIDE, number % across * SIDE};
}
