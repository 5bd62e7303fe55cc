// Step 1: one thread for each row, three passes over memory: maximum, sum, output.
//
// Neighbouring threads read addresses a whole row apart: a warp's load touches 32 sectors of 32 bytes and
// uses one element of each. With few rows most of the GPU is idle. Bytes: 3n read + n written.
#include "numeric.cuh"

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous.
extern "C" __global__ void softmax_three_passes(const WEFT_T* x, WEFT_T* y, index_t rows,
                                                index_t columns, index_t stride) {
  const index_t row = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += row * stride;
  y += row * columns;
  float top = to_float(x[0]);
  for (index_t j = 1; j < columns; ++j) top = fmaxf(top, to_float(x[j]));
  double total = 0.0;  // one long chain of additions: a float's error would grow with the row's length
  for (index_t j = 0; j < columns; ++j) total += expf(to_float(x[j]) - top);
  for (index_t j = 0; j < columns; ++j)
    y[j] = from_float<WEFT_T>(expf(to_float(x[j]) - top) / (float)total);
}
