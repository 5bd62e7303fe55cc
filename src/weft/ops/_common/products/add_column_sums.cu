// out (columns,) = the sum of `count` rows of partials (count, columns), float32: the column sums that
// the epilogue SLOPE (output.cuh) stores for each 16 rows of its product.
//
// A block adds 32 columns, a warp of it every 32nd row, and then the warps' sums in their order.
// Bytes: 4 for each element of partials, which the L2 still has, and those of out.
#include "numeric.cuh"

struct ColumnArguments {
  const float* partials;
  WEFT_T* out;
  long long count, columns;
};

extern "C" __global__ void __launch_bounds__(1024) add_column_sums(const ColumnArguments arguments) {
  __shared__ float sums[32][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long columns = arguments.columns, column = (long long)blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (long long row = warp; row < arguments.count; row += 32)
      sum += arguments.partials[row * columns + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) sum += sums[i][lane];
  arguments.out[column] = from_float<WEFT_T>(sum);
}
