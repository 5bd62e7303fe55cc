// Step 3: shared memory sized at launch, so that the block is free to be large, and the first
// addition done on the way in, so that no thread idles at once.
//
// Bytes: n read, 8 a block written, which now covers 2 * blockDim.x elements.
#include "partial.cuh"

// x: (n,); sums: (gridDim.x,). blockDim.x is a power of two; shared memory holds a Short for each.
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
