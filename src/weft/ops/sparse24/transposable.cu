// Pruning a matrix and its transpose with one mask that is 2:4 in both: greedy in tiles of 4 x 4.
//
// w (rows, columns), both multiples of 4, is read once. A block of 256 threads has 64 x 64 elements, each
// thread a tile: it takes the largest element that may stay, again and again, until every row or column of
// what remains has two. Values and codes of both orientations go through shared memory, so that rows of
// either are written in whole sectors. Bytes: w once, and 9/16 of it for each orientation.
// Source: Hubara et al., arXiv:2102.08124, the greedy method.
#include "codes.cuh"

namespace {

constexpr int SIDE = 64, TILES = SIDE / GROUP, THREADS = TILES * TILES;
constexpr int KEPT_SIDE = SIDE / 2, STRIDE = KEPT_SIDE + VECTOR;  // of a row in shared memory: 16-byte chunks

// Returns the mask of a tile: bit 4 r + c is element (r, c).
__device__ __forceinline__ unsigned greedy_mask(const Element (&e)[GROUP][GROUP]) {
  unsigned mask = 0, open = 0xffff;  // elements that stay, and those that still may
#pragma unroll 1
  for (int round = 0; round < 2 * GROUP; ++round) {
    int best = -1, at = 0;
#pragma unroll
    for (int i = 0; i < GROUP * GROUP; ++i) {
      const int key = open >> i & 1 ? magnitude(e[i / GROUP][i % GROUP]) : -1;
      if (key > best) best = key, at = i;
    }
    if (best < 0) break;
    mask |= 1u << at;
    open &= ~(1u << at);
    const unsigned row = 0xfu << at / GROUP * GROUP, column = 0x1111u << at % GROUP;
    if (__popc(mask & row) == 2) open &= ~row;
    if (__popc(mask & column) == 2) open &= ~column;
  }
  return mask;
}

// Writes the two elements of a group that its four bits of a mask keep, and returns their code. A group with
// fewer is filled up with 0 at the lowest free places.
__device__ __forceinline__ unsigned keep_four(Element a, Element b, Element c, Element d, unsigned four,
                                              Element* kept) {
  unsigned places = four;
  while (__popc(places) < 2) places |= places + 1;  // sets the lowest bit that is 0
  const unsigned first = __ffs(places) - 1, second = __ffs(places & places - 1) - 1;
  kept[0] = four >> first & 1 ? pick(a, b, c, d, first) : (Element)0;
  kept[1] = four >> second & 1 ? pick(a, b, c, d, second) : (Element)0;
  return first | second << 2;
}

}  // namespace

// The block's 64 rows of values and 128 words of one orientation.
struct Output {
  Element* values;
  unsigned* metadata;
  index_t rows, kept_columns, row_blocks, column_blocks;
};

namespace {

__device__ __forceinline__ void write(const Output& to, const Element (*values)[STRIDE],
                                      const unsigned char (*codes)[TILES], index_t block_row,
                                      index_t block_column) {
  const int thread = threadIdx.x;
  for (int i = thread; i < SIDE * (KEPT_SIDE / VECTOR); i += THREADS) {
    const int row = i / (KEPT_SIDE / VECTOR), first = i % (KEPT_SIDE / VECTOR) * VECTOR;
    const index_t at_row = block_row * SIDE + row, column = block_column * KEPT_SIDE + first;
    Element chunk[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) chunk[j] = values[row][first + j];
    if (at_row < to.rows)
      store(to.values + at_row * to.kept_columns + column, chunk, to.kept_columns - column);
  }
  const index_t row_block = block_row * (SIDE / 16) + thread / 32;
  if (thread >= SIDE / 16 * 32 || row_block >= to.row_blocks || block_column >= to.column_blocks) return;
  unsigned word = 0;
#pragma unroll
  for (int part = 0; part < 8; ++part) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + part / 4 * 8;
    word |= (unsigned)codes[row][thread % 4 * 4 + part % 4] << part * 4;
  }
  to.metadata[(block_column * to.row_blocks + row_block) * 32 + thread % 32] = word;
}

}  // namespace

// values, metadata: of w; values_t, metadata_t: of its transpose, (columns, rows / 2) and so on. The grid has
// blocks_across blocks for each 64 rows, so many that it covers the padding of both metadata. Without the
// hint of three blocks an SM the compiler spills on sm_80.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
prune_tiles(const Element* __restrict__ w, Element* __restrict__ values, unsigned* __restrict__ metadata,
            Element* __restrict__ values_t, unsigned* __restrict__ metadata_t, index_t rows, index_t columns,
            index_t stride, index_t blocks_across) {
  __shared__ __align__(16) Element kept[2][SIDE][STRIDE];
  __shared__ unsigned char codes[2][SIDE][TILES];
  const index_t block_row = blockIdx.x / blocks_across, block_column = blockIdx.x % blocks_across;
  const int tile_row = threadIdx.x / TILES, tile_column = threadIdx.x % TILES;
  const index_t row = block_row * SIDE + tile_row * GROUP, column = block_column * SIDE + tile_column * GROUP;
  const bool exists = row < rows && column < columns;  // the whole tile
  Element e[GROUP][GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    Vec<GROUP> four = {};
    const Element* from = w + (row + i) * stride + column;
    if (WIDE && exists) four = *reinterpret_cast<const Vec<GROUP>*>(from);
#pragma unroll
    for (int j = 0; j < GROUP; ++j) e[i][j] = WIDE ? four.at[j] : exists ? from[j] : (Element)0;
  }
  const unsigned mask = greedy_mask(e);
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    const unsigned across = mask >> i * GROUP & 15;
    unsigned down = 0;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) down |= (mask >> (j * GROUP + i) & 1) << j;
    Element* const two = &kept[0][tile_row * GROUP + i][tile_column * 2];
    Element* const two_t = &kept[1][tile_column * GROUP + i][tile_row * 2];
    const unsigned code = keep_four(e[i][0], e[i][1], e[i][2], e[i][3], across, two);
    const unsigned code_t = keep_four(e[0][i], e[1][i], e[2][i], e[3][i], down, two_t);
    codes[0][tile_row * GROUP + i][tile_column] = exists ? code : FILLER;
    codes[1][tile_column * GROUP + i][tile_row] = exists ? code_t : FILLER;
  }
  __syncthreads();
  const index_t row_blocks = (rows + 127) / 128 * 8, row_blocks_t = (columns + 127) / 128 * 8;
  write({values, metadata, rows, columns / 2, row_blocks, (columns + 63) / 64}, kept[0], codes[0], block_row,
        block_column);
  write({values_t, metadata_t, columns, rows / 2, row_blocks_t, (rows + 63) / 64}, kept[1], codes[1],
        block_column, block_row);
}
