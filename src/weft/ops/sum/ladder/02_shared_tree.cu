// Step 2: a block adds its elements by a tree in shared memory and writes one sum, without atomics.
//
// The order is fixed, so that each run gives the same bits. Half of the threads are idle after the load, and
// three quarters after the first addition. Bytes: n read, 8 for each block written.
#include "partial.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// x: (n,); sums: (gridDim.x,). One thread for each element.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_step(const WEFT_T* x, double* sums, index_t n) {
  __shared__ Short shared[THREADS];
  const int t = threadIdx.x;
  const index_t i = (index_t)blockIdx.x * THREADS + t;
  shared[t] = i < n ? widen(x[i]) : Short(0);
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    // The active threads are adjacent, so that whole warps retire early, and they read adjacent words: no
    // bank conflict. With a stride that doubles instead, a warp would read every 2nd, 4th, ... bank.
    if (t < half) shared[t] += shared[t + half];
    __syncthreads();
  }
  if (t == 0) sums[blockIdx.x] = shared[0];
}
