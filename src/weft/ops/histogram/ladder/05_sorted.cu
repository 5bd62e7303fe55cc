// Step 5: a block sorts the bins of a chunk, and adds the length of each run of equal ones.
//
// The time does not depend on the elements, and a chunk takes one addition for each different bin. The sort
// (Batcher's bitonic network) takes log2(n)^2 / 2 rounds with a barrier each, which is more than it saves.
// Bytes: n read.
#include "tables.cuh"

constexpr int CHUNK = 2 * THREADS;  // elements; a power of two

// Sorts CHUNK bins in shared memory, smallest first.
__device__ __forceinline__ void sort_chunk(int* sorted) {
  for (int size = 2; size <= CHUNK; size *= 2)
    for (int stride = size / 2; stride > 0; stride /= 2) {
      // Each thread has one pair: `left`, whose bit `stride` is 0, and its partner, whose bit is 1.
      const int left = 2 * threadIdx.x - (threadIdx.x & (stride - 1)), right = left + stride;
      const int a = sorted[left], b = sorted[right];
      const bool rising = (left & size) == 0;
      if (a > b == rising) sorted[left] = b, sorted[right] = a;
      __syncthreads();
    }
}

// Returns the position after the last of the bins equal to the one at `start`.
__device__ __forceinline__ int end_of_run(const int* sorted, int start) {
  int low = start, high = CHUNK;  // the end is past low, and at high or before
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (sorted[middle] == sorted[start]) low = middle;
    else high = middle;
  }
  return high;
}

// x: (n,); counts: (bins,), zeros before the launch; bins <= TABLE.
extern "C" __global__ void histogram(const WEFT_T* x, Count* counts, index_t n, index_t bin_count,
                                     double low, double high, double scale) {
  const Bins bins = bins_from(bin_count, low, high, scale);
  __shared__ unsigned table[TABLE];
  __shared__ int sorted[CHUNK];
  clear(table, bins.count);
  for (index_t start = (index_t)blockIdx.x * CHUNK; start < n; start += (index_t)gridDim.x * CHUNK) {
    for (int k = threadIdx.x; k < CHUNK; k += THREADS)
      sorted[k] = start + k < n ? bin_of(x[start + k], bins) : NONE;
    __syncthreads();
    sort_chunk(sorted);
    for (int k = threadIdx.x; k < CHUNK; k += THREADS)
      if (sorted[k] != NONE && (k == 0 || sorted[k - 1] != sorted[k]))
        atomicAdd(table + sorted[k], (unsigned)(end_of_run(sorted, k) - k));
    __syncthreads();  // the chunk has been read before the next one overwrites it
  }
  __syncthreads();  // a block without a chunk has cleared its table
  add_tables(table, 1, counts, bins.count);
}
