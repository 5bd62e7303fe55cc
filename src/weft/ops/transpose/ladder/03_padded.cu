// Step 3: an element of padding at the end of each row of the tile.
//
// The elements of a column then lie in 32 different banks. The padding costs memory, and no row but the first
// is aligned to more than an element. Bytes: as in step 2.
#include "tile.cuh"

// x: (batches, rows, columns), matrices at batch_stride and rows at row_stride elements; y: (batches,
// columns, rows) contiguous.
extern "C" __global__ void transpose(const WEFT_T* x, WEFT_T* y, index_t batches, index_t rows,
                                     index_t columns, index_t batch_stride, index_t row_stride) {
  __shared__ WEFT_T tile[SIDE][SIDE + 1];
  const int lane = threadIdx.x % SIDE, first = threadIdx.x / SIDE;
  for (index_t number = blockIdx.x; number < count_tiles(batches, rows, columns); number += gridDim.x) {
    const Tile t = tile_of(number, rows, columns);
    const WEFT_T* source = x + t.batch * batch_stride;
    WEFT_T* target = y + t.batch * rows * columns;
    for (int i = first; i < SIDE; i += LINES) {
      const int j = lane;
      if (t.row + i < rows && t.column + j < columns)
        tile[i][j] = source[(t.row + i) * row_stride + t.column + j];
    }
    __syncthreads();
    for (int j = first; j < SIDE; j += LINES) {
      const int i = lane;
      if (t.row + i < rows && t.column + j < columns)
        target[(t.column + j) * rows + t.row + i] = tile[i][j];
    }
    __syncthreads();  // the tile has been read before the next one overwrites it
  }
}
