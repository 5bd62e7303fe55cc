// Step 4: a thread computes 8 elements of one column, whose sums stay in registers.
//
// A factor of b is read once for 8 fma, and the 8 factors of a are the same for the whole warp: 9 shared
// loads for 8 fma, where step 3 needs 16. A block computes 64 x 64 of c, K is taken 8 at a time.
#include "numeric.cuh"

namespace { constexpr int SIDE = 64, BK = 8, ROWS = 8, THREADS = SIDE * SIDE / ROWS; }

// a: (m, k), b: (k, n), c: (m, n), contiguous. One block for each 64 x 64 of c, tiles row by row.
extern "C" __global__ void __launch_bounds__(THREADS)
matmul_register_column(const float* a, const float* b, float* c, index_t m, index_t n, index_t k) {
  __shared__ float a_tile[SIDE][BK], b_tile[BK][SIDE];
  const int t = threadIdx.x, x = t % SIDE, y = t / SIDE * ROWS;
  const index_t column_tiles = (n + SIDE - 1) / SIDE;
  const index_t top = blockIdx.x / column_tiles * SIDE, left = blockIdx.x % column_tiles * SIDE;
  float sums[ROWS] = {};
  for (index_t first = 0; first < k; first += BK) {
    // 512 threads copy 512 elements of each operand.
    const int a_row = t / BK, a_k = t % BK, b_k = t / SIDE;
    const bool in_a = top + a_row < m && first + a_k < k, in_b = first + b_k < k && left + x < n;
    a_tile[a_row][a_k] = in_a ? a[(top + a_row) * k + first + a_k] : 0.0f;
    b_tile[b_k][x] = in_b ? b[(first + b_k) * n + left + x] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BK; ++i) {
      const float factor = b_tile[i][x];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) sums[r] = fmaf(a_tile[y + r][i], factor, sums[r]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    if (top + y + r < m && left + x < n) c[(top + y + r) * n + left + x] = sums[r];
}
