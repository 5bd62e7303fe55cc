// Step 1: one thread for each row.
//
// Neighbouring threads read different rows, so that the loads of a warp are as far apart as the rows are
// long, and a warp takes as long as its longest row. Bytes: each 4-byte element may cost a sector of 32.
#include "../sparse.cuh"

// values, columns: (nonzeros,); offsets: (rows + 1,); x: (x_size,); y: (rows,).
extern "C" __global__ void thread_a_row(const WEFT_T* __restrict__ values, const int* __restrict__ columns,
                                        const offset_t* __restrict__ offsets, const WEFT_T* __restrict__ x,
                                        WEFT_T* __restrict__ y, index_t rows, index_t nonzeros,
                                        index_t x_size) {
  const index_t row = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  acc_t sum = 0;
  const index_t end = row_end(offsets, row, nonzeros);
  for (index_t k = row_begin(offsets, row); k < end; ++k)
    sum += widen(values[k]) * gather(x, columns[k], x_size);
  y[row] = narrow<WEFT_T>(sum);
}
