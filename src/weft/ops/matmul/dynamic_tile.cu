// Product by tiles whose width is an argument: shared memory is sized at the launch, not by the compiler.
//
// Step 3 of the ladder (03_shared_tile.cu) with its constant replaced by a variable. One program serves every
// width that a block's threads allow; the price is that the inner loop has no known length, so that it is not
// unrolled, and that indices into shared memory are multiplied by a variable.
#include "numeric.cuh"

// a: (h, k), b: (k, w), c: (h, w), contiguous. One block of width * width threads for each
// width x width of c, tiles row by row. Dynamic shared memory: 2 * width * width floats.
extern "C" __global__ void matmul_dynamic_tile(
    const float* a, const float* b, float* c, index_t h, index_t w, index_t k, index_t width) {
  const int tile = (int)width;
  // An array without a size begins at the block's dynamic shared memory. There is one such beginning, so
  // that the second array is a pointer into the first.
  extern __shared__ __align__(16) unsigned char pool[];
  float *a_tile = (float*)pool, *b_tile = a_tile + tile * tile;
  const int x = threadIdx.x % tile, y = threadIdx.x / tile;
  const index_t column_tiles = (w + tile - 1) / tile;
  const index_t row = blockIdx.x / column_tiles * tile + y;
  const index_t column = blockIdx.x % column_tiles * tile + x;
  float sum = 0.0f;
  for (index_t first = 0; first < k; first += tile) {
    // Past the end of K both factors are 0. Past the other edges the sums are never stored.
    a_tile[y * tile + x] = row < h && first + x < k ? a[row * k + first + x] : 0.0f;
    b_tile[y * tile + x] = first + y < k && column < w ? b[(first + y) * w + column] : 0.0f;
    __syncthreads();
    for (int i = 0; i < tile; ++i) sum = fmaf(a_tile[y * tile + i], b_tile[i * tile + x], sum);
    __syncthreads();  // nobody may overwrite a tile that another thread still reads
  }
  if (row < h && column < w) c[row * w + column] = sum;
}
