// Step 4: one addition for the lanes of a warp that have the same bin.
//
// A vote finds the lanes with an equal bin; the first of them adds their number. All-equal elements take one
// addition a warp. The vote takes one round for each different bin, so that different elements are slower
// than in step 3. Bytes: n read.
#include "tables.cuh"

constexpr unsigned ALL = 0xffffffffu;

// x: (n,); counts: (bins,), zeros before the launch; bins <= TABLE.
extern "C" __global__ void histogram(const WEFT_T* x, Count* counts, index_t n, index_t bin_count,
                                     double low, double high, double scale) {
  const Bins bins = bins_from(bin_count, low, high, scale);
  __shared__ unsigned table[TABLE];
  clear(table, bins.count);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const index_t step = (index_t)gridDim.x * THREADS;
  // All lanes of a warp take part in each round: the vote names them.
  for (index_t start = (index_t)blockIdx.x * THREADS; start < n; start += step) {
    const index_t i = start + threadIdx.x;
    const int bin = i < n ? bin_of(x[i], bins) : NONE;
    const unsigned peers = __match_any_sync(ALL, bin);
    if (bin != NONE && lane == __ffs(peers) - 1) atomicAdd(table + bin, (unsigned)__popc(peers));
  }
  __syncthreads();
  add_tables(table, 1, counts, bins.count);
}
