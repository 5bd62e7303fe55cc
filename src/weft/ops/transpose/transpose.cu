// Transpose of the last two dimensions by accesses of ACCESS bytes on both sides.
//
// A block has a tile of ROW_BYTES bytes square: SIDE x SIDE elements. A thread loads a sub-tile of VEC rows,
// each one access of VEC elements, transposes it in registers, and stores its columns in shared memory as
// parts of output rows. The block then writes whole output rows. Loads, stores and shared memory are all
// accessed in units of ACCESS bytes: 16 where all rows on both sides are aligned to 16 bytes, else fewer.
// Bytes: each element is read once and written once.
#include "numeric.cuh"

#ifndef ACCESS
#define ACCESS 16
#endif
#ifndef ROW_BYTES
#define ROW_BYTES 128
#endif
#ifndef THREADS
#define THREADS 64
#endif

constexpr int VEC = ACCESS / (int)sizeof(WEFT_T);
constexpr int SIDE = ROW_BYTES / (int)sizeof(WEFT_T);
constexpr int UNITS = ROW_BYTES / ACCESS;   // accesses in a row of the tile; sub-tiles side by side
constexpr int STEP = THREADS / UNITS;       // rows of sub-tiles that the block loads at once
constexpr int PASSES = UNITS / STEP;
constexpr int LINE_UNITS = 128 / ACCESS;    // units in one row of the 32 banks
constexpr int WORD_UNITS = ACCESS < 4 ? 4 / ACCESS : 1;  // units in one bank
// Passes whose loads are in flight together: 16 accesses of a thread, where registers are what limits them.
constexpr int AT_ONCE = VEC >= 16 ? 1 : PASSES < 16 / VEC ? PASSES : 16 / VEC;
static_assert(PASSES % AT_ONCE == 0, "every round of passes is whole");
static_assert(UNITS % STEP == 0 && UNITS >= LINE_UNITS, "a tile is whole passes of whole rows of banks");

// Bytes are handled four in a word: one by one, they would take a register each.
constexpr bool IN_WORDS = sizeof(WEFT_T) == 1 && ACCESS >= 4;
template <bool> struct CellType { typedef WEFT_T type; };
template <> struct CellType<true> { typedef unsigned type; };
constexpr int CELLS = IN_WORDS ? ACCESS / 4 : VEC;
using Pack = Vector<CellType<IN_WORDS>::type, CELLS>;

// Returns the position in shared memory of a unit of an output row. The lanes of a phase store units of
// equal number in rows VEC apart, which would all lie in one bank: the exclusive or spreads them over all
// banks. The lanes that load a row again have its units in another order, and each bank once.
__device__ __forceinline__ int position(int row, int unit) {
  const int key = row / VEC * WORD_UNITS % LINE_UNITS;
  return row * UNITS + (unit ^ key);
}

// Transposes each block of 4 x 4 bytes of a sub-tile where it lies.
__device__ __forceinline__ void transpose_blocks(Pack (&rows)[VEC]) {
#pragma unroll
  for (int i = 0; i < VEC; i += 4)
#pragma unroll
    for (int j = 0; j < CELLS; ++j) {
      const unsigned r0 = rows[i].at[j], r1 = rows[i + 1].at[j];
      const unsigned r2 = rows[i + 2].at[j], r3 = rows[i + 3].at[j];
      // A selector's digits are the bytes of the result, lowest first: 0 to 3 of the first word, 4 to 7 of
      // the second.
      const unsigned low01 = __byte_perm(r0, r1, 0x5140), high01 = __byte_perm(r0, r1, 0x7362);
      const unsigned low23 = __byte_perm(r2, r3, 0x5140), high23 = __byte_perm(r2, r3, 0x7362);
      rows[i].at[j] = __byte_perm(low01, low23, 0x5410);
      rows[i + 1].at[j] = __byte_perm(low01, low23, 0x7632);
      rows[i + 2].at[j] = __byte_perm(high01, high23, 0x5410);
      rows[i + 3].at[j] = __byte_perm(high01, high23, 0x7632);
    }
}

// Returns column j of a sub-tile; of bytes, after `transpose_blocks`.
__device__ __forceinline__ Pack column_of(const Pack (&rows)[VEC], int j) {
  Pack column;
#pragma unroll
  for (int i = 0; i < CELLS; ++i) {
    if constexpr (IN_WORDS) column.at[i] = rows[4 * i + j % 4].at[j / 4];
    else column.at[i] = rows[i].at[j];
  }
  return column;
}

// x: (batches, rows, columns), matrices at batch_stride and rows at row_stride elements; y: (batches,
// columns, rows) contiguous. rows and columns are multiples of VEC.
extern "C" __global__ void __launch_bounds__(THREADS)
transpose(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t batches, index_t rows,
          index_t columns, index_t batch_stride, index_t row_stride) {
  __shared__ Pack tile[SIDE * UNITS];
  const int unit = threadIdx.x % UNITS, first = threadIdx.x / UNITS;
  const index_t down = (rows + SIDE - 1) / SIDE, across = (columns + SIDE - 1) / SIDE;
  const index_t tiles = batches * down * across;
  // One round, unless there are more tiles than a grid has blocks.
  for (index_t number = blockIdx.x; number < tiles; number += gridDim.x) {
    const index_t batch = number / (down * across), in_matrix = number % (down * across);
    const index_t row0 = in_matrix / across * SIDE, column0 = in_matrix % across * SIDE;
    const WEFT_T* source = x + batch * batch_stride + row0 * row_stride + column0;
    WEFT_T* target = y + batch * rows * columns + column0 * rows + row0;
#pragma unroll 1
    for (int start = first; start < UNITS; start += AT_ONCE * STEP) {
      // All loads are issued before the first is used.
      Pack lines[AT_ONCE][VEC];
#pragma unroll
      for (int p = 0; p < AT_ONCE; ++p) {
        const int row = (start + p * STEP) * VEC, column = unit * VEC;
        if (row0 + row < rows && column0 + column < columns)
#pragma unroll
          for (int i = 0; i < VEC; ++i)
            lines[p][i] = *reinterpret_cast<const Pack*>(source + (row + i) * row_stride + column);
      }
#pragma unroll
      for (int p = 0; p < AT_ONCE; ++p) {
        if constexpr (IN_WORDS) transpose_blocks(lines[p]);
#pragma unroll
        for (int j = 0; j < VEC; ++j)
          tile[position(unit * VEC + j, start + p * STEP)] = column_of(lines[p], j);
      }
    }
    __syncthreads();
#pragma unroll 16
    for (int k = 0; k < SIDE / STEP; ++k) {
      const int row = first + k * STEP, column = unit * VEC;
      if (column0 + row < columns && row0 + column < rows)
        *reinterpret_cast<Pack*>(target + row * rows + column) = tile[position(row, unit)];
    }
    __syncthreads();  // the tile has been read before the next round overwrites it
  }
}
