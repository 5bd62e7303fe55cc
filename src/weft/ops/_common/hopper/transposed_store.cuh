// The end of a tile of y^T = W x^T: a warp group rounds its 64 x COLUMNS sums and stores them as rows of y.
#pragma once
#include "ptx.cuh"
#include "warp_roles.cuh"

namespace hopper {

// The buffer of a group in shared memory: BOXES boxes of 64 rows of 64 columns of y, which are filled FILLS
// times for a tile of COLUMNS rows.
template <int COLUMNS> struct TransposedBuffer {
  static constexpr int BOX_BYTES = 64 * 128;
  static constexpr int BOXES = COLUMNS % 128 == 0 ? 2 : 1, FILLS = COLUMNS / (64 * BOXES);
  static constexpr int BYTES = BOXES * BOX_BYTES;
};

// Stores the 64 x COLUMNS sums of a group as COLUMNS rows of y, 64 columns each, from (column, row) on. They
// are transposed on their way to the buffer. A row of y there is 128 bytes, swizzled as the copy engine reads
// it.
// `bias`: of this thread's two rows of sums, accumulator_row(thread, 0) and accumulator_row(thread, 2).
template <typename T, int COLUMNS>
__device__ __forceinline__ void store_transposed(const float (&sums)[COLUMNS / 2], const float (&bias)[2],
                                                 const TensorMap* y, int group, unsigned buffer, int row,
                                                 int column) {
  using Buffer = TransposedBuffer<COLUMNS>;
  const int thread = threadIdx.x % GROUP_THREADS, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int fill = 0; fill < Buffer::FILLS; ++fill) {
    // The storing thread's copies have read the buffer; then everyone may overwrite it.
    if (is_storer()) tma_wait_read<0>();
    named_barrier(1 + group, GROUP_THREADS);
#pragma unroll
    for (int pair = 0; pair < Buffer::BOXES * 4; ++pair) {  // 16 columns of the sums: rows of y
      const int i = (fill * Buffer::BOXES * 64 + pair * 16) / 2;
      // Matrices of 8 x 8: columns 0 to 7 with rows 0 to 7 and 8 to 15, then columns 8 to 15.
      unsigned words[4];
#pragma unroll
      for (int word = 0; word < 4; ++word)
        words[word] = rounded_pair<T>(sums[i + word * 2] + bias[word % 2],
                                      sums[i + word * 2 + 1] + bias[word % 2]);
      // Lane l gives the address of row l % 8 of matrix l / 8, after the transposition.
      const int y_row = pair * 16 + lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
      store_matrices_transposed(buffer + y_row * 128 + ((chunk ^ (y_row & 7)) << 4), words[0], words[1],
                                words[2], words[3]);
    }
    fence_async_proxy();
    named_barrier(1 + group, GROUP_THREADS);
    if (is_storer()) {
#pragma unroll
      for (int box = 0; box < Buffer::BOXES; ++box)
        tma_store(y, buffer + box * Buffer::BOX_BYTES, row, column + (fill * Buffer::BOXES + box) * 64);
      tma_commit();
    }
  }
}

}  // namespace hopper
