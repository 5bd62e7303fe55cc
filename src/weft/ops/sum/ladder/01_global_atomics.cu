// Step 1: every thread adds its element to one double in global memory.
//
// The hardware decides the order of the additions, so that two runs may differ in the last bits of the
// double. All n additions go to one address and are executed one after another by its L2 slice: the time is
// the number of atomics, far above the time of the bytes. Bytes: n read.
#include "partial.cuh"

// x: (n,); sum: one double, 0 before the launch. One thread for each element.
extern "C" __global__ void sum_step(const WEFT_T* x, double* sum, index_t n) {
  const index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(sum, (double)widen(x[i]));
}
