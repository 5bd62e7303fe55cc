// Step 2: one block for each row, so that neighbouring threads read neighbouring elements; maximum and sum by
// trees in shared memory, with 2 log2(THREADS) barriers. Bytes: 3n read + n written, coalesced.
#include "numeric.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. THREADS is a power of
// two.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_shared_reduction(const WEFT_T* x, WEFT_T* y, index_t rows, index_t columns,
                         index_t stride) {
  __shared__ float scratch[THREADS];
  const int t = threadIdx.x;
  x += blockIdx.x * stride;
  y += blockIdx.x * columns;

  float top = __int_as_float(0xff800000);  // -inf
  for (index_t j = t; j < columns; j += THREADS) top = fmaxf(top, to_float(x[j]));
  scratch[t] = top;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) scratch[t] = fmaxf(scratch[t], scratch[t + half]);
  }
  __syncthreads();
  top = scratch[0];
  __syncthreads();  // every thread has read the maximum before scratch is overwritten

  float total = 0.0f;
  for (index_t j = t; j < columns; j += THREADS) total += expf(to_float(x[j]) - top);
  scratch[t] = total;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) scratch[t] += scratch[t + half];
  }
  __syncthreads();
  total = scratch[0];

  for (index_t j = t; j < columns; j += THREADS)
    y[j] = from_float<WEFT_T>(expf(to_float(x[j]) - top) / total);
}
