// Step 4: the sums of the tiles come first, without a scan; each tile is then scanned from its prefix.
//
// Bytes: n read by the first launch, n read and n written by the last: three quarters of step 3. The output
// is rounded once, where step 3 rounds it twice.
#include "block_scan.cuh"
#include "reduce.cuh"

// x: (rows, columns), rows at x_stride elements; sums: (rows, tiles).
extern "C" __global__ void __launch_bounds__(THREADS)
sum_tiles(const WEFT_T* x, float* sums, index_t columns, index_t x_stride, index_t tiles) {
  __shared__ float scratch[32];
  const index_t row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  float v[ITEMS];
  load_items(v, x + row * x_stride, tile, columns);
  const float sum = block_sum((v[0] + v[1]) + (v[2] + v[3]), scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// x: as above; prefixes: (rows, tiles), the inclusive scan of the sums; y: (rows, columns) contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
scan_from_prefix(const WEFT_T* x, const float* prefixes, WEFT_T* y, index_t columns, index_t x_stride,
                 index_t tiles) {
  __shared__ float totals[WARPS];
  const index_t row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  float v[ITEMS];
  load_items(v, x + row * x_stride, tile, columns);
  scan_block(v, totals);
  const float before = tile ? prefixes[(index_t)blockIdx.x - 1] : 0.0f;
  store_items(v, before, y + row * columns, tile, columns);
}
