// Step 6: 16 bytes for each access to global and shared memory.
//
// 256 threads copy a tile of each operand by one float4 each, and a's tile is stored with K as its row, so
// that 8 factors are two float4: 4 shared loads for 64 fma, where step 5 needs 16.
#include "squares.cuh"

// a: (m, k), b: (k, n), c: (m, n), contiguous, 16-byte aligned; k and n are multiples of 4. One block for
// each 128 x 128 of c, tiles row by row.
extern "C" __global__ void __launch_bounds__(THREADS)
matmul_vectors(const float* a, const float* b, float* c, index_t m, index_t n, index_t k) {
  __shared__ __align__(16) float a_tile[BK][SIDE];
  __shared__ __align__(16) float b_tile[BK][SIDE];
  const int t = threadIdx.x, x = t % 16 * 8, y = t / 16 * 8;
  const index_t column_tiles = (n + SIDE - 1) / SIDE;
  const index_t top = blockIdx.x / column_tiles * SIDE, left = blockIdx.x % column_tiles * SIDE;
  const int a_row = t / 2, a_k = t % 2 * 4, b_k = t / 32, b_column = t % 32 * 4;
  const bool in_a = top + a_row < m, in_b = left + b_column < n;
  const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  Squares<4, 4> squares;
  for (index_t first = 0; first < k; first += BK) {
    const float* const from_a = a + (top + a_row) * k + first + a_k;
    const float* const from_b = b + (first + b_k) * n + left + b_column;
    const float4 of_a = in_a && first + a_k < k ? *reinterpret_cast<const float4*>(from_a) : zeros;
    const float4 of_b = in_b && first + b_k < k ? *reinterpret_cast<const float4*>(from_b) : zeros;
    a_tile[a_k][a_row] = of_a.x, a_tile[a_k + 1][a_row] = of_a.y;
    a_tile[a_k + 2][a_row] = of_a.z, a_tile[a_k + 3][a_row] = of_a.w;
    *reinterpret_cast<float4*>(&b_tile[b_k][b_column]) = of_b;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BK; ++i) squares.add(&a_tile[i][y], &b_tile[i][x]);
    __syncthreads();
  }
  squares.store(c, top + y, left + x, m, n);
}
