// Step 4: the elements of a row are exchanged instead: element j lies at j ^ i.
//
// The exclusive or with the row is another order in each row, so that a column lies in 32 banks, and a row
// in 32 banks as before. No memory is lost, and rows stay aligned. Bytes: as in step 2.
#include "tile.cuh"

// x: (batches, rows, columns), matrices at batch_stride and rows at row_stride elements; y: (batches,
// columns, rows) contiguous.
extern "C" __global__ void transpose(const WEFT_T* x, WEFT_T* y, index_t batches, index_t rows,
                                     index_t columns, index_t batch_stride, index_t row_stride) {
  __shared__ WEFT_T tile[SIDE][SIDE];
  const int lane = threadIdx.x % SIDE, first = threadIdx.x / SIDE;
  for (index_t number = blockIdx.x; number < count_tiles(batches, rows, columns); number += gridDim.x) {
    const Tile t = tile_of(number, rows, columns);
    const WEFT_T* source = x + t.batch * batch_stride;
    WEFT_T* target = y + t.batch * rows * columns;
    for (int i = first; i < SIDE; i += LINES) {
      const int j = lane;
      if (t.row + i < rows && t.column + j < columns)
        tile[i][j ^ i] = source[(t.row + i) * row_stride + t.column + j];
    }
    __syncthreads();
    for (int j = first; j < SIDE; j += LINES) {
      const int i = lane;
      if (t.row + i < rows && t.column + j < columns)
        target[(t.column + j) * rows + t.row + i] = tile[i][j ^ i];
    }
    __syncthreads();  // the tile has been read before the next one overwrites it
  }
}
