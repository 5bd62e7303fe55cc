// Step 2: a table of counters in shared memory for each block, added to the counts at the block's end.
//
// Memory sees an addition for each bin and block. Additions of a warp that meet in a bank take turns, as do
// those of other warps. Bytes: n read.
#include "tables.cuh"

// x: (n,); counts: (bins,), zeros before the launch; bins <= TABLE.
extern "C" __global__ void histogram(const WEFT_T* x, Count* counts, index_t n, index_t bin_count,
                                     double low, double high, double scale) {
  const Bins bins = bins_from(bin_count, low, high, scale);
  __shared__ unsigned table[TABLE];
  clear(table, bins.count);
  __syncthreads();
  const index_t step = (index_t)gridDim.x * THREADS;
  for (index_t i = (index_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
    const int bin = bin_of(x[i], bins);
    if (bin != NONE) atomicAdd(table + bin, 1u);
  }
  __syncthreads();
  add_tables(table, 1, counts, bins.count);
}
