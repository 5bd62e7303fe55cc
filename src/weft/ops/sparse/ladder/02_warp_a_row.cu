// Step 2: one warp for each row, whose lanes read neighbouring nonzeros.
//
// Loads are contiguous, but a row of 16 nonzeros leaves half of the lanes idle, and one row of all columns
// still belongs to one warp.
#include "reduce.cuh"
#include "../sparse.cuh"

// values, columns: (nonzeros,); offsets: (rows + 1,); x: (x_size,); y: (rows,).
extern "C" __global__ void warp_a_row(const WEFT_T* __restrict__ values, const int* __restrict__ columns,
                                      const offset_t* __restrict__ offsets, const WEFT_T* __restrict__ x,
                                      WEFT_T* __restrict__ y, index_t rows, index_t nonzeros,
                                      index_t x_size) {
  const index_t row = ((index_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  acc_t sum = 0;
  const index_t end = row_end(offsets, row, nonzeros);
  for (index_t k = row_begin(offsets, row) + lane; k < end; k += 32)
    sum += widen(values[k]) * gather(x, columns[k], x_size);
  sum = warp_sum(sum);
  if (lane == 0) y[row] = narrow<WEFT_T>(sum);
}
