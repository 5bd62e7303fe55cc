// What steps 6 to 9 share: 128 x 128 of c a block, 8 of K at a time, 8 x 8 of c a thread, float4
// throughout.
#pragma once
#include "numeric.cuh"

constexpr int SIDE = 128, BK = 8, THREADS = 256;

// The 8 x 8 sums of a thread, as 2 x 2 squares of 4 x 4. `GAP` is the distance of the squares: 4 makes
// them one block of 8 x 8, more lets the threads between read the elements between.
template <int GAP_ROWS, int GAP_COLUMNS> struct Squares {
  float sums[8][8] = {};

  // Add the products of one k: `a` and `b` are its factors in shared memory, at this thread's first row and
  // column, 16-byte aligned.
  __device__ __forceinline__ void add(const float* a, const float* b) {
    float a_factors[8], b_factors[8];
    *reinterpret_cast<float4*>(a_factors) = *reinterpret_cast<const float4*>(a);
    *reinterpret_cast<float4*>(a_factors + 4) = *reinterpret_cast<const float4*>(a + GAP_ROWS);
    *reinterpret_cast<float4*>(b_factors) = *reinterpret_cast<const float4*>(b);
    *reinterpret_cast<float4*>(b_factors + 4) = *reinterpret_cast<const float4*>(b + GAP_COLUMNS);
#pragma unroll
    for (int r = 0; r < 8; ++r)
#pragma unroll
      for (int s = 0; s < 8; ++s) sums[r][s] = fmaf(a_factors[r], b_factors[s], sums[r][s]);
  }

  // Store to c (m, n) at this thread's first row and column. n is a multiple of 4: a group of 4 is in or out.
  __device__ __forceinline__ void store(float* c, index_t row, index_t column, index_t m, index_t n) const {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const index_t i = row + r % 4 + r / 4 * GAP_ROWS;
#pragma unroll
      for (int s = 0; s < 8; s += 4) {
        const index_t j = column + s / 4 * GAP_COLUMNS;
        if (i < m && j < n)
          *reinterpret_cast<float4*>(c + i * n + j) =
              make_float4(sums[r][s], sums[r][s + 1], sums[r][s + 2], sums[r][s + 3]);
      }
    }
  }
};
