// Step 3: a block for each tile of a row. Tiles are scanned by themselves, then their sums, which a last
// launch adds to the tiles after them.
//
// All SMs work on one row. Bytes: n read and n written by the first launch, and again by the last.
#include "block_scan.cuh"

// x: (rows, columns), rows at x_stride elements; y: (rows, columns) contiguous; sums: (rows, tiles).
extern "C" __global__ void __launch_bounds__(THREADS)
scan_tiles(const WEFT_T* x, WEFT_T* y, float* sums, index_t columns, index_t x_stride, index_t tiles) {
  __shared__ float totals[WARPS];
  const index_t row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  float v[ITEMS];
  load_items(v, x + row * x_stride, tile, columns);
  const float sum = scan_block(v, totals);
  store_items(v, 0.0f, y + row * columns, tile, columns);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// y: (rows, columns), changed in place; prefixes: (rows, tiles), the inclusive scan of the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
propagate(WEFT_T* y, const float* prefixes, index_t columns, index_t tiles) {
  const index_t row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  if (tile == 0) return;
  float v[ITEMS];
  load_items(v, y + row * columns, tile, columns);
  store_items(v, prefixes[(index_t)blockIdx.x - 1], y + row * columns, tile, columns);
}
