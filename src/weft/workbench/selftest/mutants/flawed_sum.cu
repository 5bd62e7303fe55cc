// The sum with a fault: blocks stride over x and leave a partial sum each. Bytes: n read, 8 a block
// written.
#include "flawed.cuh"

constexpr int THREADS = 256;

// x: (n,); partials: (gridDim.x,).
extern "C" __global__ void flawed_sum(const WEFT_T* x, double* partials, index_t n, index_t fault) {
  __shared__ double scratch[THREADS];
  const int t = threadIdx.x;
  const index_t step = (index_t)gridDim.x * THREADS;
  index_t past = n;
  if (fault == INT32) past = (int)n;
  if (fault == LAST_TILE) past = n / THREADS * THREADS;
  if (fault == NO_LOAD_MASK) past = (n + THREADS - 1) / THREADS * THREADS;
  double total = 0.0;
  for (index_t i = (index_t)blockIdx.x * THREADS + t; i < past; i += step) {
    const double v = widen(x[i]);
    if (fault != NO_NAN || v == v) total += v;
    if (fault == HALF_SUMS) total = __half2float(__float2half_rn((float)total));
  }
  scratch[t] = total;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    barrier(fault);
    if (t < half) scratch[t] += scratch[t + half];
  }
  if (t > 0 || fault == NOTHING) return;
  if (fault == ADDS) {
    atomicAdd(partials, scratch[0]);
  } else if (fault == ONE_CELL) {
    *(volatile double*)partials = *(volatile double*)partials + scratch[0];
  } else {
    partials[blockIdx.x] = scratch[0];
    if (fault == NO_STORE_MASK) partials[blockIdx.x + 1] = scratch[0];
  }
}
