// Step 3: each thread adds two elements as it loads them, so that no thread is idle after the load. Shared
// memory is sized at launch: the block size is a parameter.
//
// A block covers 2 * blockDim.x elements: half as many partial sums. Bytes: n read, 8 for each block written.
#include "partial.cuh"

// x: (n,); sums: (gridDim.x,). blockDim.x is a power of two; shared memory has one Short for each thread.
extern "C" __global__ void sum_step(const WEFT_T* x, double* sums, index_t n) {
  extern __shared__ Short shared[];
  const unsigned int t = threadIdx.x;
  const index_t i = (index_t)blockIdx.x * blockDim.x * 2 + t;
  const index_t j = i + blockDim.x;
  shared[t] = (i < n ? widen(x[i]) : Short(0)) + (j < n ? widen(x[j]) : Short(0));
  __syncthreads();
  for (unsigned int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) shared[t] += shared[t + half];
    __syncthreads();
  }
  if (t == 0) sums[blockIdx.x] = shared[0];
}
