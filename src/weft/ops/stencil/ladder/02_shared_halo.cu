// Step 2: a tile and its halo in shared memory.
//
// A block loads 8 rows of 32 columns, and one more on each side, then computes from shared memory. The halo
// is 84 cells for 256, and its columns are loads of one cell in a row of memory. Bytes: 1.33 n read at worst,
// n written.
#include "terms.cuh"

constexpr int WIDE = 32, TALL = 8;

// x: (batches, rows, columns), grids at batch_stride and rows at row_stride elements; weights: (5,); y:
// (batches, rows, columns) contiguous.
extern "C" __global__ void stencil(const WEFT_T* x, const WEFT_T* weights, WEFT_T* y, index_t batches,
                                   index_t rows, index_t columns, index_t batch_stride, index_t row_stride) {
  __shared__ float tile[TALL + 2][WIDE + 2];
  const Tile t = tile_of(blockIdx.x, rows, columns, TALL, WIDE);
  const WEFT_T* source = x + t.batch * batch_stride;
  for (int k = threadIdx.x; k < (TALL + 2) * (WIDE + 2); k += blockDim.x) {
    const int down = k / (WIDE + 2), right = k % (WIDE + 2);
    const index_t i = t.row + down - 1, j = t.column + right - 1;
    const bool inside = i >= 0 && i < rows && j >= 0 && j < columns;
    tile[down][right] = inside ? to_float(source[i * row_stride + j]) : 0.0f;
  }
  __syncthreads();
  const int right = threadIdx.x % WIDE;
  for (int down = threadIdx.x / WIDE; down < TALL; down += blockDim.x / WIDE) {
    const index_t i = t.row + down, j = t.column + right;
    if (i >= rows || j >= columns) continue;
    float sum = to_float(weights[0]) * tile[down + 1][right + 1];
    sum = add_if(i > 0, to_float(weights[1]), tile[down][right + 1], sum);
    sum = add_if(i + 1 < rows, to_float(weights[2]), tile[down + 2][right + 1], sum);
    sum = add_if(j > 0, to_float(weights[3]), tile[down + 1][right], sum);
    sum = add_if(j + 1 < columns, to_float(weights[4]), tile[down + 1][right + 2], sum);
    y[(t.batch * rows + i) * columns + j] = from_float<WEFT_T>(sum);
  }
}
