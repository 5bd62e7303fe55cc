// Order of the tiles of a product among blocks, for every architecture.
#pragma once

namespace hopper {

struct Tile { int row, column; };

// Returns the place of tile `index`. Tiles come in bands of BAND rows of tiles, column by column: blocks that
// run at the same time share rows of a and columns of b in the L2 cache. With BAND = 8 and 132 SMs that have
// one tile each, 8 + 17 rows and columns of tiles are read for 132 tiles, instead of 1 + 132 in row order.
template <int BAND> __device__ __forceinline__ Tile tile_at(int index, int row_tiles, int column_tiles) {
  const int in_band = BAND * column_tiles, band = index / in_band, within = index % in_band;
  const int height = min(row_tiles - band * BAND, BAND);
  return {band * BAND + within % height, within / height};
}

}  // namespace hopper
