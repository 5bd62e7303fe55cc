// Softmax with a fault: a block a row, maximum and sum by trees in shared memory. Bytes: 3n read +
// n written.
#include "flawed.cuh"

constexpr int THREADS = 256;

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous; sums: (rows,) for ADDS.
extern "C" __global__ void flawed_softmax(const WEFT_T* x, WEFT_T* y, float* sums, index_t rows,
                                          index_t columns, index_t stride, index_t fault) {
  __shared__ float scratch[THREADS];
  const int t = threadIdx.x;
  const index_t row = blockIdx.x;
  x += row * (fault == ANY_STRIDES ? columns : stride);
  y += row * columns;
  const index_t read = fault == NO_LOAD_MASK ? (columns + 31) / 32 * 32 : columns;

  float top = __int_as_float(0xff800000);  // -inf
  for (index_t j = t; j < read; j += THREADS) top = fmaxf(top, to_float(x[j]));
  scratch[t] = top;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    barrier(fault);
    if (t < half) scratch[t] = fmaxf(scratch[t], scratch[t + half]);
  }
  __syncthreads();
  top = fault == NO_MAXIMUM ? 0.0f : scratch[0];
  __syncthreads();  // all have read it before any writes again

  float total = 0.0f;
  for (index_t j = t; j < read; j += THREADS) {
    const float e = expf(to_float(x[j]) - top);
    if (fault != NO_NAN || e == e) total += e;
    if (fault == HALF_SUMS) total = __half2float(__float2half_rn(total));
  }
  scratch[t] = total;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    barrier(fault);
    if (t < half) scratch[t] += scratch[t + half];
  }
  __syncthreads();
  total = scratch[0];
  if (fault == NO_SCALE) total += 1e-3f;
  if (fault == ADDS) {
    if (t == 0) scratch[0] = atomicAdd(sums + row, total) + total;
    __syncthreads();
    total = scratch[0];
  }

  const int past = (int)(rows * columns);
  for (index_t j = t; j < columns + (fault == NO_STORE_MASK); j += THREADS) {
    if (fault == NOTHING || (fault == LAST_TILE && row == rows - 1)) continue;
    if (fault == INT32 && (int)(row * columns + j) >= past) continue;
    // The row behind writes over what one too many is stored of this one, all but the last.
    if (j == columns && row < rows - 1) continue;
    y[j] = from_float<WEFT_T>(expf(j < columns ? to_float(x[j]) - top : 0.0f) / total);
  }
}
