// Sparse matrix in sliced ELL times vector: a warp for each slice of 32 rows, a lane for each row.
//
// The rows of a slice are padded to the length of its longest. Entry j of all 32 rows lies side by side, so
// that every load of the matrix is contiguous, and no lane needs another's sum (A. Monakov, A. Lokhmotov and
// A. Avetisyan, "Automatically tuning sparse matrix-vector multiplication for GPU architectures", HiPEAC
// 2010). Bytes: each slot's value and column once, padding included, y once; x from the caches.
#include "sparse.cuh"

#ifndef THREADS
#define THREADS 128
#endif
constexpr int PADDING = -1;

// values, columns: (slots,); starts: (slices + 1,), the first slot of each slice; order: (rows,), the row of
// the matrix in each place; x: (x_size,); y: (rows,).
extern "C" __global__ void __launch_bounds__(THREADS)
sliced_ell(const WEFT_T* __restrict__ values, const int* __restrict__ columns,
           const index_t* __restrict__ starts, const index_t* __restrict__ order,
           const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t rows, index_t x_size) {
  const index_t place = (index_t)blockIdx.x * THREADS + threadIdx.x, slice = place / 32;
  if (place >= rows) return;
  const index_t end = starts[slice + 1];
  acc_t sum = 0;
#pragma unroll 4
  for (index_t slot = starts[slice] + place % 32; slot < end; slot += 32) {
    const int column = __ldcs(columns + slot);
    const acc_t value = widen(values[slot]);
    if (column != PADDING) sum += value * gather(x, column, x_size);
  }
  y[order[place]] = narrow<WEFT_T>(sum);
}
