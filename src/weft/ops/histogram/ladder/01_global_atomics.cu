// Step 1: an atomic addition in memory for each element.
//
// The L2 adds one value at a time to an address: equal elements wait for each other. Bytes: n read; 8 for
// each element at the L2.
#include "../bins.cuh"

// x: (n,); counts: (bins,), zeros before the launch.
extern "C" __global__ void histogram(const WEFT_T* x, Count* counts, index_t n, index_t bin_count,
                                     double low, double high, double scale) {
  const Bins bins = bins_from(bin_count, low, high, scale);
  const index_t step = (index_t)gridDim.x * blockDim.x;
  for (index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    const int bin = bin_of(x[i], bins);
    if (bin != NONE) atomicAdd(counts + bin, 1ull);
  }
}
