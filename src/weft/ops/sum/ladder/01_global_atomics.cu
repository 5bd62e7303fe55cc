// Step 1: every thread adds its element to one double in global memory.
//
// The order is the hardware's, so two runs may differ in the last bits of the double. All n
// additions queue for one address. Bytes: n read.
#include "partial.cuh"

// x: (n,); sum: one double, zero before. One thread an element.
extern "C" __global__ void sum_step(const WEFT_T* x, double* sum, index_t n) {
  const index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(sum, (double)widen(x[i]));
}
