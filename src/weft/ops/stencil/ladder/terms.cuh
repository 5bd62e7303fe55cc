// Shared by the steps: where a cell is, and the sum of its five terms.
#pragma once
#include "numeric.cuh"

// Adds a term if the neighbour exists, and nothing if not: an Inf times 0 would be NaN.
__device__ __forceinline__ float add_if(bool exists, float weight, float neighbour, float sum) {
  return exists ? fmaf(weight, neighbour, sum) : sum;
}

// A tile of one grid for each block: TALL rows of WIDE columns.
struct Tile { index_t batch, row, column; };

__device__ __forceinline__ index_t tiles_along(index_t size, int side) { return (size + side - 1) / side; }

__device__ __forceinline__ Tile tile_of(index_t number, index_t rows, index_t columns, int tall, int wide) {
  const index_t across = tiles_along(columns, wide), down = tiles_along(rows, tall);
  return {number / (across * down), number / across % down * tall, number % across * wide};
}
