// Step 1: one thread a row, three passes over memory: maximum, sum, answers.
//
// Neighbouring threads read addresses a whole row apart, so that of each 32-byte sector fetched one
// element is used at a time. Bytes: 3n read + n written.
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
  double total = 0.0;  // one long chain of additions, which a float would not carry
  for (index_t j = 0; j < columns; ++j) total += expf(to_float(x[j]) - top);
  for (index_t j = 0; j < columns; ++j)
    y[j] = from_float<WEFT_T>(expf(to_float(x[j]) - top) / (float)total);
}
