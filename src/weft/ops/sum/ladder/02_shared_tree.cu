// Step 2: a block adds its elements by a tree in shared memory, and writes one sum.
//
// Bytes: n read, 8 a block written; half of the threads idle after the load, and ever more after
// that.
#include "partial.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// x: (n,); sums: (gridDim.x,). One thread an element.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_step(const WEFT_T* x, double* sums, index_t n) {
  __shared__ Short shared[THREADS];
  const int t = threadIdx.x;
  const index_t i = (index_t)blockIdx.x * THREADS + t;
  shared[t] = i < n ? widen(x[i]) : Short(0);
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (t < half) shared[t] += shared[t + half];
    __syncthreads();
  }
  if (t == 0) sums[blockIdx.x] = shared[0];
}
