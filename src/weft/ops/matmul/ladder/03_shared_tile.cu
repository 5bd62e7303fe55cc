// Step 3: a block copies 32 x 32 of a and of b to shared memory, and all its threads use them.
//
// Each element from global memory is used 32 times: 1/16 load for each fma. Shared memory now takes the 2
// loads for each fma, and is the limit.
#include "numeric.cuh"

namespace { constexpr int SIDE = 32; }

// a: (m, k), b: (k, n), c: (m, n), contiguous. One block for each 32 x 32 of c, tiles row by row.
extern "C" __global__ void __launch_bounds__(SIDE* SIDE)
matmul_shared_tile(const float* a, const float* b, float* c, index_t m, index_t n, index_t k) {
  __shared__ float a_tile[SIDE][SIDE], b_tile[SIDE][SIDE];
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  const index_t column_tiles = (n + SIDE - 1) / SIDE;
  const index_t row = blockIdx.x / column_tiles * SIDE + y;
  const index_t column = blockIdx.x % column_tiles * SIDE + x;
  float sum = 0.0f;
  for (index_t first = 0; first < k; first += SIDE) {
    // Past the end of K both factors are 0. Past the other edges the sums are never stored.
    a_tile[y][x] = row < m && first + x < k ? a[row * k + first + x] : 0.0f;
    b_tile[y][x] = first + y < k && column < n ? b[(first + y) * n + column] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SIDE; ++i) sum = fmaf(a_tile[y][i], b_tile[i][x], sum);
    __syncthreads();  // nobody may overwrite a tile that another thread still reads
  }
  if (row < m && column < n) c[row * n + column] = sum;
}
