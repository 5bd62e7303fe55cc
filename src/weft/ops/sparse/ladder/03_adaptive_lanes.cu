// Step 3: a group of lanes for each row, as many as the rows have nonzeros on average.
//
// Short rows share a warp, so that few lanes are idle where all rows are about equally long. A warp still
// takes as long as the longest of its rows. A lane has two sums, so that the loads of two nonzeros are in
// flight at once.
#include "reduce.cuh"
#include "../sparse.cuh"

// Adds over groups of `lanes` lanes, a power of two; all 32 lanes of the warp take part.
__device__ __forceinline__ acc_t group_sum(acc_t sum, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
  return sum;
}

// values, columns: (nonzeros,); offsets: (rows + 1,); x: (x_size,); y: (rows,).
extern "C" __global__ void adaptive_lanes(const WEFT_T* __restrict__ values, const int* __restrict__ columns,
                                          const offset_t* __restrict__ offsets, const WEFT_T* __restrict__ x,
                                          WEFT_T* __restrict__ y, index_t rows, index_t nonzeros,
                                          index_t x_size, index_t lanes) {
  const int group = (int)lanes, lane = threadIdx.x & (group - 1);
  const index_t row = (index_t)blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  // A group without a row goes on with no nonzeros: the shuffles name all lanes of its warp.
  const index_t begin = row < rows ? row_begin(offsets, row) : 0;
  const index_t end = row < rows ? row_end(offsets, row, nonzeros) : 0;
  acc_t sums[2] = {0, 0};
  index_t k = begin + lane;
  for (; k + group < end; k += 2 * group) {
    const int columns_here[2] = {columns[k], columns[k + group]};
    const acc_t values_here[2] = {widen(values[k]), widen(values[k + group])};
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] += values_here[i] * gather(x, columns_here[i], x_size);
  }
  if (k < end) sums[0] += widen(values[k]) * gather(x, columns[k], x_size);
  const acc_t sum = group_sum(sums[0] + sums[1], group);
  if (lane == 0 && row < rows) y[row] = narrow<WEFT_T>(sum);
}
