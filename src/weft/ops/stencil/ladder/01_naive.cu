// Step 1: a thread for each cell, five loads.
//
// The lanes of a warp have neighbouring columns. The caches serve most of the loads: a line is requested five
// times. Bytes: n read and n written at best; 5n through the L1 cache.
#include "terms.cuh"

// x: (batches, rows, columns), grids at batch_stride and rows at row_stride elements; weights: (5,); y:
// (batches, rows, columns) contiguous.
extern "C" __global__ void stencil(const WEFT_T* x, const WEFT_T* weights, WEFT_T* y, index_t batches,
                                   index_t rows, index_t columns, index_t batch_stride, index_t row_stride) {
  const index_t k = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (k >= batches * rows * columns) return;
  const index_t j = k % columns, i = k / columns % rows;
  const WEFT_T* cell = x + k / columns / rows * batch_stride + i * row_stride + j;
  float sum = to_float(weights[0]) * to_float(cell[0]);
  if (i > 0) sum = fmaf(to_float(weights[1]), to_float(cell[-row_stride]), sum);
  if (i + 1 < rows) sum = fmaf(to_float(weights[2]), to_float(cell[row_stride]), sum);
  if (j > 0) sum = fmaf(to_float(weights[3]), to_float(cell[-1]), sum);
  if (j + 1 < columns) sum = fmaf(to_float(weights[4]), to_float(cell[1]), sum);
  y[k] = from_float<WEFT_T>(sum);
}
