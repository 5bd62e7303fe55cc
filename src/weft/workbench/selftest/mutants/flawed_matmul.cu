// The product with a fault: a block takes SIDE x SIDE of c through tiles in shared memory, in
// float32. Bytes a block: 2 SIDE K read.
#include "flawed.cuh"

constexpr int SIDE = 16;

// a: (M, K) and b: (K, N) by strides in elements; c: (M, N) contiguous.
extern "C" __global__ void flawed_matmul(const WEFT_T* a, const WEFT_T* b, WEFT_T* c, index_t m,
                                         index_t n, index_t k, index_t a_row, index_t a_column,
                                         index_t b_row, index_t b_column, index_t fault) {
  __shared__ float a_tile[SIDE][SIDE], b_tile[SIDE][SIDE];
  const int x = threadIdx.x, y = threadIdx.y;
  const index_t row = (index_t)blockIdx.x * SIDE + y, column = (index_t)blockIdx.y * SIDE + x;
  if (fault == ANY_STRIDES) a_row = k, a_column = 1, b_row = n, b_column = 1;
  const index_t past = fault == NO_LOAD_MASK ? k + 1 : k;
  const index_t steps = fault == LAST_TILE ? k / SIDE : (k + SIDE - 1) / SIDE;
  float acc = 0.0f;
  for (index_t start = 0; start < steps * SIDE; start += SIDE) {
    const index_t i = start + x, j = start + y;
    a_tile[y][x] = row < m && i < past ? to_float(a[row * a_row + i * a_column]) : 0.0f;
    b_tile[y][x] = column < n && j < past ? to_float(b[j * b_row + column * b_column]) : 0.0f;
    barrier(fault);
    for (int s = 0; s < SIDE; ++s) {
      const float v = a_tile[y][s];
      if (fault == NO_NAN && v != v) continue;
      acc = fmaf(v, b_tile[s][x], acc);
      if (fault == HALF_SUMS) acc = __half2float(__float2half_rn(acc));
    }
    barrier(fault);
  }
  bool inside = row < m && column < n;
  const index_t at = row * n + column;
  if (fault == NO_STORE_MASK) inside = row <= m && column < n;  // off by one: a row too many
  if (fault == INT32) inside = inside && (int)at < (int)(m * n);
  if (fault == NO_SCALE) acc *= 1.01f;
  if (fault == ADDS && inside) acc += to_float(c[at]);
  if (inside && fault != NOTHING) c[at] = from_float<WEFT_T>(acc);
}
