// Step 1: a thread for each element.
//
// The lanes of a warp read neighbouring elements and write them a row of y apart: each store touches a sector
// of 32 bytes for one element. Bytes: n read; up to 32 for each element written.
#include "numeric.cuh"

// x: (batches, rows, columns), matrices at batch_stride and rows at row_stride elements; y: (batches,
// columns, rows) contiguous.
extern "C" __global__ void transpose(const WEFT_T* x, WEFT_T* y, index_t batches, index_t rows,
                                     index_t columns, index_t batch_stride, index_t row_stride) {
  const index_t step = (index_t)gridDim.x * blockDim.x;
  for (index_t k = (index_t)blockIdx.x * blockDim.x + threadIdx.x; k < batches * rows * columns; k += step) {
    const index_t j = k % columns, i = k / columns % rows, batch = k / columns / rows;
    y[batch * rows * columns + j * rows + i] = x[batch * batch_stride + i * row_stride + j];
  }
}
