// Matrices whose rows are no multiple of 16 bytes, through the copy engine.
//
// A tensor map needs rows at multiples of 16 bytes, and eight rows of any matrix together are such a
// multiple. So a matrix has eight maps: map j has its rows j, j + 8, j + 16, ... It begins at the multiple of
// 16 bytes at or before the first of them, `shift` elements before it; a box may begin at any element. Each
// map ends where the rows do: what lies outside becomes 0, and is not written.
//
// Eight boxes, one of each map, thus make a tile whose rows have another order: row 8 i + j of LENGTH is at
// j * LENGTH / 8 + i. For an operand that is K-major, these are rows or columns of c, and the epilogue takes
// them back to their places. For operands that are MN-major they are K, of which the order does not count if
// both have the same. If only b is MN-major, a comes from registers, in which its K gets b's order. MN-major
// operands whose rows are aligned keep K in order, if there is no other to agree with.
#pragma once
#include "hopper/ptx.cuh"
#include "hopper/wgmma.cuh"

namespace hopper {

// Elements between the begin of map j and row j. `shifts` has four bits for each map.
__device__ __forceinline__ int shift_of(unsigned shifts, int j) { return shifts >> 4 * j & 15; }

// Loads every eighth row of a tile: for K-major operands rows (columns) first + j, first + j + 8, ..., else K
// k + j, k + j + 8, ... The tile is LENGTH rows (columns) by 128 bytes of K.
template <int MAJOR, int LENGTH>
__device__ __forceinline__ void load_residue(unsigned to, const TensorMap* maps, unsigned shifts, int j,
                                             int k, int first, unsigned full) {
  const int shift = shift_of(shifts, j);
  if constexpr (MAJOR == K_MAJOR) {
    tma_load(to + j * (LENGTH / 8) * 128, maps + j, k + shift, first / 8, full);
  } else {
#pragma unroll
    for (int block = 0; block < LENGTH / 64; ++block)
      tma_load(to + block * BLOCK_BYTES + j * ATOM_BYTES, maps + j, first + block * 64 + shift, k / 8, full);
  }
}

// Words of a's fragments (wgmma_register_shapes.cuh) for products `step` of 16 in the order that K has in an
// MN-major tile: 2 step, 2 step + 8, ..., 2 step + 56, then the same plus 1.
// `at`: row 0 of the group's 64 in a K-major tile of 128 rows, where row 8 i + j is at 16 j + i.
__device__ __forceinline__ void load_fragments(unsigned (&fragments)[4][4], unsigned at) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, row = lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Accumulator row 16 warp + 8 half + row is row 8 row + (2 warp + half) of a.
    const unsigned from = at + ((2 * warp + half) * 16 + row) * 128;
    unsigned even[4], odd[4];  // 8 of K each: the lane's two K of a product are 8 apart
    load_words(even, from + ((lane % 4 * 2 ^ row) << 4));
    load_words(odd, from + ((lane % 4 * 2 + 1 ^ row) << 4));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      fragments[step][half] = even[step] & 0xffff | odd[step] << 16;
      fragments[step][half + 2] = even[step] >> 16 | odd[step] & 0xffff0000;
    }
  }
}

// Place in a group's 64 x WIDTH of c of element `i` of a thread's accumulators, as accumulator_row and
// accumulator_column (wgmma.cuh): for operands that are K-major, in the order of their tiles' rows.
template <int A_MAJOR> __device__ __forceinline__ int unaligned_row(int thread, int i) {
  const int row = accumulator_row(thread, i);
  return A_MAJOR == K_MAJOR ? row % 8 * 8 + row / 8 : row;
}
template <int B_MAJOR, int WIDTH> __device__ __forceinline__ int unaligned_column(int thread, int i) {
  const int column = accumulator_column(thread, i);
  return B_MAJOR == K_MAJOR ? column % (WIDTH / 8) * 8 + column / (WIDTH / 8) : column;
}

}  // namespace hopper
