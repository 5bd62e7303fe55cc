// Step 3: a table for each warp.
//
// Warps no longer wait for each other's counters. The lanes of a warp still meet in banks. Bytes: n read.
#include "tables.cuh"

constexpr int WARPS = THREADS / 32;

// x: (n,); counts: (bins,), zeros before the launch; bins * WARPS <= TABLE.
extern "C" __global__ void histogram(const WEFT_T* x, Count* counts, index_t n, index_t bin_count,
                                     double low, double high, double scale) {
  const Bins bins = bins_from(bin_count, low, high, scale);
  __shared__ unsigned table[TABLE];
  clear(table, WARPS * bins.count);
  __syncthreads();
  unsigned* own = table + threadIdx.x / 32 * bins.count;
  const index_t step = (index_t)gridDim.x * THREADS;
  for (index_t i = (index_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
    const int bin = bin_of(x[i], bins);
    if (bin != NONE) atomicAdd(own + bin, 1u);
  }
  __syncthreads();
  add_tables(table, WARPS, counts, bins.count);
}
