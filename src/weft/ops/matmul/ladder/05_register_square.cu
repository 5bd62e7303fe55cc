// Step 5: a thread computes 8 x 8 elements.
//
// 8 factors of a and 8 of b are read into registers for 64 fma: 1 shared load for 4 fma, where step 4
// needs more than one for each. A block computes 128 x 128 of c, so that each element from global memory
// is used 128 times.
#include "numeric.cuh"

namespace { constexpr int SIDE = 128, BK = 8, PER = 8, ACROSS = SIDE / PER, THREADS = ACROSS * ACROSS; }

// a: (m, k), b: (k, n), c: (m, n), contiguous. One block for each 128 x 128 of c, tiles row by row.
extern "C" __global__ void __launch_bounds__(THREADS)
matmul_register_square(const float* a, const float* b, float* c, index_t m, index_t n, index_t k) {
  __shared__ float a_tile[SIDE][BK], b_tile[BK][SIDE];
  const int t = threadIdx.x, x = t % ACROSS * PER, y = t / ACROSS * PER;
  const index_t column_tiles = (n + SIDE - 1) / SIDE;
  const index_t top = blockIdx.x / column_tiles * SIDE, left = blockIdx.x % column_tiles * SIDE;
  float sums[PER][PER] = {};
  for (index_t first = 0; first < k; first += BK) {
#pragma unroll
    for (int e = t; e < SIDE * BK; e += THREADS) {
      const int a_row = e / BK, a_k = e % BK, b_k = e / SIDE, b_column = e % SIDE;
      const bool in_a = top + a_row < m && first + a_k < k, in_b = first + b_k < k && left + b_column < n;
      a_tile[a_row][a_k] = in_a ? a[(top + a_row) * k + first + a_k] : 0.0f;
      b_tile[b_k][b_column] = in_b ? b[(first + b_k) * n + left + b_column] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BK; ++i) {
      float a_factors[PER], b_factors[PER];
#pragma unroll
      for (int e = 0; e < PER; ++e) a_factors[e] = a_tile[y + e][i], b_factors[e] = b_tile[i][x + e];
#pragma unroll
      for (int r = 0; r < PER; ++r)
#pragma unroll
        for (int s = 0; s < PER; ++s) sums[r][s] = fmaf(a_factors[r], b_factors[s], sums[r][s]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < PER; ++r)
#pragma unroll
    for (int s = 0; s < PER; ++s)
      if (top + y + r < m && left + x + s < n) c[(top + y + r) * n + left + x + s] = sums[r][s];
}
