// Tiles of both operands that asynchronous copies fill while the tiles before them are multiplied.
#pragma once
#include "async_copy.cuh"
#include "squares.cuh"

// Two buffers, each of a [BK][A_PITCH] and b [BK][SIDE]. A row of a's tile is one k; A_PITCH floats apart.
template <int A_PITCH> struct CopiedTiles {
  static constexpr int A_FLOATS = BK * A_PITCH, FLOATS = A_FLOATS + BK * SIDE;  // of one buffer

  const float *from_a, *from_b, *shared;
  index_t k, n;
  int a_k, b_k, a_valid, b_valid;
  unsigned to_a, to_b;

  // The tile whose first row and column are `top` and `left`; `pool` has 2 FLOATS floats.
  __device__ CopiedTiles(const float* a, const float* b, float* pool, index_t top, index_t left, index_t m,
                         index_t columns, index_t inner)
      : shared(pool), k(inner), n(columns) {
    const int t = threadIdx.x, a_row = t / 2, b_column = t % 32 * 4;
    a_k = t % 2 * 4, b_k = t / 32;
    // A copy of 0 bytes fills its target with 0, but its address must be valid all the same.
    a_valid = top + a_row < m ? 4 : 0, b_valid = left + b_column < n ? 16 : 0;
    from_a = a + (a_valid ? top + a_row : 0) * k;
    from_b = b + (b_valid ? left + b_column : 0);
    to_a = shared_address(pool + a_k * A_PITCH + a_row);
    to_b = shared_address(pool + A_FLOATS + b_k * SIDE + b_column);
  }

  // Ask for the tiles at `first` of K, into buffer `number`. Past the end of K the buffer is filled with 0.
  __device__ __forceinline__ void copy(index_t first, int number) {
    const unsigned buffer = number * FLOATS * 4;
    const bool a_inside = first + a_k < k, b_inside = first + b_k < k;
    const float* const of_a = from_a + (a_inside ? first + a_k : 0);
#pragma unroll
    for (int e = 0; e < 4; ++e)  // transposed on the way, so that a copy moves one element
      copy_async<4>(to_a + buffer + e * A_PITCH * 4, of_a + e, a_inside ? a_valid : 0);
    const float* const of_b = from_b + (b_inside ? first + b_k : 0) * n;
    copy_async<16>(to_b + buffer, of_b, b_inside ? b_valid : 0);
    copies_commit();
  }

  __device__ __forceinline__ const float* a(int number, int i) const {
    return shared + number * FLOATS + i * A_PITCH;
  }
  __device__ __forceinline__ const float* b(int number, int i) const {
    return shared + number * FLOATS + A_FLOATS + i * SIDE;
  }
};

// Multiply all tiles of K: the next is copied while this one is multiplied. `y` and `x` are the thread's
// first row and column in the tile.
template <typename Tiles, typename Sums>
__device__ __forceinline__ void multiply(Tiles& tiles, Sums& sums, int y, int x) {
  tiles.copy(0, 0);
  int buffer = 0;
  for (index_t first = 0; first < tiles.k; first += BK, buffer ^= 1) {
    copies_wait<0>();
    __syncthreads();  // everybody's copies have arrived, and nobody reads the other buffer any more
    if (first + BK < tiles.k) tiles.copy(first + BK, buffer ^ 1);
#pragma unroll
    for (int i = 0; i < BK; ++i) sums.add(tiles.a(buffer, i) + y, tiles.b(buffer, i) + x);
  }
}
