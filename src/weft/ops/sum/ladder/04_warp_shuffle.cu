// Step 4: a warp adds its 32 sums by shuffles between registers; shared memory has one sum of each warp.
//
// One __syncthreads() instead of ten, and no shared memory traffic within a warp. Bytes: as step 3.
#include "partial.cuh"

// x: (n,); sums: (gridDim.x,). blockDim.x is a multiple of 32; two elements for each thread.
extern "C" __global__ void sum_step(const WEFT_T* x, double* sums, index_t n) {
  __shared__ Short shared[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t i = (index_t)blockIdx.x * blockDim.x * 2 + threadIdx.x;
  const index_t j = i + blockDim.x;
  Short sum = (i < n ? widen(x[i]) : Short(0)) + (j < n ? widen(x[j]) : Short(0));
  sum = warp_reduce<AddShort>(sum);
  if (lane == 0) shared[warp] = sum;
  __syncthreads();
  // The whole first warp continues: its shuffles name all 32 lanes.
  if (warp > 0) return;
  sum = lane < blockDim.x / 32 ? shared[lane] : Short(0);
  sum = warp_reduce<AddShort>(sum);
  if (lane == 0) sums[blockIdx.x] = sum;
}
