// The order in which the blocks of a product take the tiles of c.
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
