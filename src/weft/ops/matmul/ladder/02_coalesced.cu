// Step 2: neighbouring threads in neighbouring columns.
//
// The threads of a warp read 32 adjacent elements of b (4 sectors), and one element of a that all of them
// share: 5 sectors a pair of loads where step 1 needs 33. Loads: still 2 for each fma.
#include "numeric.cuh"

namespace { constexpr int SIDE = 32; }

// a: (m, k), b: (k, n), c: (m, n), contiguous. One block for each 32 x 32 of c, tiles row by row.
extern "C" __global__ void __launch_bounds__(SIDE* SIDE)
matmul_coalesced(const float* a, const float* b, float* c, index_t m, index_t n, index_t k) {
  const index_t column_tiles = (n + SIDE - 1) / SIDE;
  const index_t row = blockIdx.x / column_tiles * SIDE + threadIdx.x / SIDE;
  const index_t column = blockIdx.x % column_tiles * SIDE + threadIdx.x % SIDE;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  for (index_t i = 0; i < k; ++i) sum = fmaf(a[row * k + i], b[i * n + column], sum);
  c[row * n + column] = sum;
}
