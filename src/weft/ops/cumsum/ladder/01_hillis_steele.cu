// Step 1: one block for each row, n log2(n) additions (Hillis and Steele, "Data parallel algorithms", 1986).
//
// In round k each element adds the one 2^k before it. Two buffers take turns, so that a round reads what the
// round before has written and one barrier a round is enough. The block walks along the row, a chunk of
// THREADS elements at a time. Bytes: n read, n written, by few blocks.
#include "numeric.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// x: (gridDim.x, columns), rows at x_stride elements; y: (gridDim.x, columns) contiguous.
extern "C" __global__ void hillis_steele(const WEFT_T* x, WEFT_T* y, index_t columns, index_t x_stride) {
  __shared__ float buffers[2][THREADS];
  const WEFT_T* row = x + blockIdx.x * x_stride;
  float carry = 0.0f;
  for (index_t start = 0; start < columns; start += THREADS) {
    const index_t at = start + threadIdx.x;
    float own = at < columns ? to_float(row[at]) : 0.0f;
    int turn = 0;
    buffers[0][threadIdx.x] = own;
    __syncthreads();
    for (int step = 1; step < THREADS; step *= 2) {
      if (threadIdx.x >= step) own += buffers[turn][threadIdx.x - step];
      turn ^= 1;
      buffers[turn][threadIdx.x] = own;
      __syncthreads();
    }
    if (at < columns) y[blockIdx.x * columns + at] = from_float<WEFT_T>(carry + own);
    carry += buffers[turn][THREADS - 1];
    __syncthreads();  // the last element has been read before the next chunk overwrites it
  }
}
