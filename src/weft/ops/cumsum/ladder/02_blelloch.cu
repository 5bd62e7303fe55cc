// Step 2: one block for each row, 2 n additions (Blelloch, "Prefix sums and their applications", 1990).
//
// An up-sweep leaves the sums of ever larger parts of a chunk at the parts' ends. A down-sweep hands each
// part the sum of what is before it. No sum is subtracted. Strides of powers of two put the threads of a
// late round into one bank of shared memory, and half the threads are idle after each round. Bytes: as in
// step 1.
#include "numeric.cuh"

#ifndef THREADS
#define THREADS 256
#endif

constexpr int CHUNK = 2 * THREADS;

// x: (gridDim.x, columns), rows at x_stride elements; y: (gridDim.x, columns) contiguous.
extern "C" __global__ void blelloch(const WEFT_T* x, WEFT_T* y, index_t columns, index_t x_stride) {
  __shared__ float sums[CHUNK];
  const WEFT_T* row = x + blockIdx.x * x_stride;
  const int thread = (int)threadIdx.x;
  float carry = 0.0f;
  for (index_t start = 0; start < columns; start += CHUNK) {
    float own[2];
    for (int k = 0; k < 2; ++k) {
      const index_t at = start + thread + k * THREADS;
      own[k] = at < columns ? to_float(row[at]) : 0.0f;
      sums[thread + k * THREADS] = own[k];
    }
    __syncthreads();
    for (int half = 1; half < CHUNK; half *= 2) {  // up: parts of 2 * half elements
      const int end = (thread + 1) * 2 * half - 1;
      if (end < CHUNK) sums[end] += sums[end - half];
      __syncthreads();
    }
    const float total = sums[CHUNK - 1];
    __syncthreads();  // all threads have the total before one of them clears it
    if (thread == 0) sums[CHUNK - 1] = 0.0f;
    __syncthreads();
    for (int half = CHUNK / 2; half > 0; half /= 2) {  // down: the left half's sum goes to the right half
      const int end = (thread + 1) * 2 * half - 1;
      if (end < CHUNK) {
        const float left = sums[end - half];
        sums[end - half] = sums[end];
        sums[end] += left;
      }
      __syncthreads();
    }
    for (int k = 0; k < 2; ++k) {
      const index_t at = start + thread + k * THREADS;
      const float before = sums[thread + k * THREADS];
      if (at < columns) y[blockIdx.x * columns + at] = from_float<WEFT_T>(carry + before + own[k]);
    }
    carry += total;
    __syncthreads();  // all sums have been read before the next chunk overwrites them
  }
}
