// Pruning a matrix and its transpose with one mask that is 2:4 in both: greedy in tiles of 4 x 4.
//
// w (rows, columns), both multiples of 4, is read once. A block of 256 threads has 64 x 64 elements, each
// thread a tile: of the elements in falling order it keeps each whose row and column have fewer than two.
// Elements are sorted by a network without branches, 60 exchanges, and carry their place: the order is known
// before the greedy steps begin, and a step has four instructions. Values of w are stored as they are
// computed, 64 adjacent bytes of a row by 16 lanes; those of the transpose go through shared memory. The
// codes of a word of metadata are computed from eight masks of four bits at once.
// Bytes: w once, and 9/16 of it for each orientation.
// Source: Hubara et al., arXiv:2102.08124, the greedy method; the network of 60 exchanges is Green's (Knuth,
// The Art of Computer Programming 3, 5.3.4).
#include "codes.cuh"

namespace {

constexpr int SIDE = 64, TILES = SIDE / GROUP, THREADS = TILES * TILES, PLACES = GROUP * GROUP;
constexpr bool HALF = sizeof(Element) == 2;

using Pair = Vec<2>;  // what stays of a group, in the order of its places
constexpr int CHUNK_PAIRS = 16 / sizeof(Pair), CHUNKS = TILES / CHUNK_PAIRS;  // of a row in shared memory
constexpr int PITCH = TILES + CHUNK_PAIRS;

// The magnitude of an element above its place, in units of 4: larger keys come first, and of equal elements
// the lower place.
template <bool> struct KeyOf { using type = unsigned; };
template <> struct KeyOf<false> { using type = unsigned long long; };
using Key = typename KeyOf<HALF>::type;
__device__ __forceinline__ constexpr unsigned place_bits(int place) { return (PLACES - 1 - place) * 4; }

// What a step needs of a place: a bit of its row (0 to 3), of its column (4 to 7), and of the mask (16 on).
// It is a load from shared memory, of 16 words in 16 banks: logic is what limits this kernel.
__device__ __forceinline__ unsigned marks_of(int place) {
  return 1u << place / GROUP | 1u << (GROUP + place % GROUP) | 1u << (16 + place);
}

// Of a group with this mask: which bytes of its four 16-bit elements stay (__byte_perm), and 1 bits where
// something does. A group with fewer than two is filled up with 0 at the lowest free places.
struct Choice { unsigned selector, zeros; };
__device__ __forceinline__ Choice choice_of(unsigned four) {
  unsigned places = four;
  while (__popc(places) < 2) places |= places + 1;  // sets the lowest bit that is 0
  const unsigned first = __ffs(places) - 1, second = __ffs(places & (places - 1)) - 1;
  const unsigned low = four >> first & 1 ? 0xffff : 0, high = four >> second & 1 ? 0xffff0000 : 0;
  return {first * 0x22 + second * 0x2200 + 0x1010, low | high};
}

struct Shared {
  Pair transposed[SIDE][PITCH];
  alignas(8) unsigned short masks[2][TILES][TILES];  // of the tiles of both orientations: 4 bits a row
  unsigned marks[PLACES];
  alignas(8) Choice choices[PLACES];
};

// Sorts keys in falling order. A minimum is the sum less the maximum, by multiply-adds with factors that the
// compiler does not know: these run beside the maxima, on another pipe than comparisons and logic do.
__device__ __forceinline__ void exchange(Key& a, Key& b, unsigned one) {
  const Key larger = max(a, b);
  if constexpr (HALF) b = larger * (0u - one) + (a * one + b);
  else b = min(a, b);
  a = larger;
}
__device__ __forceinline__ void sort(Key (&keys)[PLACES], unsigned one) {
  constexpr int EXCHANGES = 60;
  constexpr unsigned char network[EXCHANGES][2] = {
      {0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}, {0, 2}, {4, 6}, {8, 10}, {12, 14},
      {1, 3}, {5, 7}, {9, 11}, {13, 15}, {0, 4}, {8, 12}, {1, 5}, {9, 13}, {2, 6}, {10, 14}, {3, 7}, {11, 15},
      {0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}, {5, 10}, {6, 9}, {3, 12},
      {13, 14}, {4, 8}, {7, 11}, {1, 2}, {1, 4}, {7, 13}, {2, 8}, {11, 14}, {2, 4}, {5, 6}, {9, 10}, {11, 13},
      {3, 8}, {7, 12}, {6, 8}, {10, 12}, {3, 5}, {7, 9}, {3, 4}, {5, 6}, {7, 8}, {9, 10}, {11, 12}, {6, 7},
      {8, 9}};
#pragma unroll
  for (int i = 0; i < EXCHANGES; ++i) exchange(keys[network[i][0]], keys[network[i][1]], one);
}

// Returns the mask of a tile: bit 4 r + c is element (r, c).
__device__ __forceinline__ unsigned greedy_mask(Key (&keys)[PLACES], const unsigned* marks, unsigned one) {
  sort(keys, one);
  unsigned kept = 0, full = 0;  // marks of what stays; bits of the rows and columns with two
#pragma unroll
  for (int i = 0; i < PLACES; ++i) {
    const unsigned at = (unsigned)keys[i] & (PLACES - 1) * 4;
    const unsigned mark = *reinterpret_cast<const unsigned*>(reinterpret_cast<const char*>(marks) + at);
    const unsigned stays = full & mark ? 0 : mark;
    full |= kept & stays;
    kept |= stays;
  }
  return kept >> 16;
}

// Returns a mask with rows and columns exchanged.
__device__ __forceinline__ unsigned transposed(unsigned mask) {
  unsigned swapped = (mask ^ mask >> 3) & 0x0a0a;
  mask ^= swapped ^ swapped << 3;
  swapped = (mask ^ mask >> 6) & 0x00cc;
  return mask ^ swapped ^ swapped << 6;
}

// Returns the codes of eight groups, 4 bits each, from their masks.
__device__ __forceinline__ unsigned codes_of(unsigned masks) {
  const unsigned right1 = masks >> 1, right2 = masks >> 2, right3 = masks >> 3;
  const unsigned first_is_1 = right1 & (right2 | right3) & 0x11111111;
  const unsigned first_is_2 = right1 & right2 & 0x22222222;
  const unsigned second_is_odd = (right1 | ~masks) & 0x44444444;  // place 3, or 1 where 2 does not stay
  const unsigned second_is_upper = (masks | masks << 1) & 0x88888888;
  return first_is_1 | first_is_2 | second_is_odd | second_is_upper;
}

// A tile in registers: elements in 16-bit types are kept two a word.
struct Tile {
  static constexpr int WORDS = HALF ? 2 : GROUP;
  unsigned row[GROUP][WORDS];

  __device__ __forceinline__ void load(const Element* from, index_t stride, bool exists) {
#pragma unroll
    for (int i = 0; i < GROUP; ++i, from += stride) {
      struct alignas(WORDS * 4) Row { unsigned at[WORDS]; } words = {};
      if constexpr (WIDE) {
        if (exists) words = *reinterpret_cast<const Row*>(from);
      } else if (exists) {
        Element four[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) four[j] = from[j];
        memcpy(&words, four, sizeof(four));
      }
#pragma unroll
      for (int j = 0; j < WORDS; ++j) row[i][j] = words.at[j];
    }
  }

  __device__ __forceinline__ void to_keys(Key (&keys)[PLACES]) const {
    constexpr unsigned NAN_BITS = INFINITY_BITS + 1;  // all NaN are alike, above infinity
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
#pragma unroll
      for (int j = 0; j < WORDS; ++j) {
        if constexpr (HALF) {
          const unsigned two = __vminu2(row[i][j] & 0x7fff7fff, NAN_BITS * 0x10001);
          const int place = i * GROUP + j * 2;
          keys[place] = (two << 16) + place_bits(place);
          keys[place + 1] = (two & 0xffff0000) | place_bits(place + 1);
        } else {
          const unsigned bits = min(row[i][j] & 0x7fffffff, NAN_BITS);
          keys[i * GROUP + j] = (Key)bits << 32 | place_bits(i * GROUP + j);
        }
      }
  }

  __device__ __forceinline__ Tile transposed() const {
    Tile to;
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
#pragma unroll
      for (int j = 0; j < WORDS; ++j) {
        if constexpr (HALF)
          to.row[i][j] = __byte_perm(row[j * 2][i / 2], row[j * 2 + 1][i / 2], i % 2 ? 0x7632 : 0x5410);
        else to.row[i][j] = row[j][i];
      }
    return to;
  }

  // Returns the two elements of row i that its mask keeps.
  __device__ __forceinline__ Pair pair(int i, unsigned mask, const Choice* choices) const {
    const unsigned at = (mask << 3 >> i * GROUP) & 0x78;
    const Choice choice = *reinterpret_cast<const Choice*>(reinterpret_cast<const char*>(choices) + at);
    Pair two;
    if constexpr (HALF) {
      const unsigned word = __byte_perm(row[i][0], row[i][1], choice.selector) & choice.zeros;
      memcpy(&two, &word, 4);
    } else {
      const unsigned first = choice.selector >> 1 & 3, second = choice.selector >> 9 & 3;
      two.at[0] = choice.zeros & 1 ? pick(row[i][0], row[i][1], row[i][2], row[i][3], first) : 0;
      two.at[1] = choice.zeros >> 16 ? pick(row[i][0], row[i][1], row[i][2], row[i][3], second) : 0;
    }
    return two;
  }
};

// A row of the transpose has the chunks of its 16-byte stores in this order: the lanes of a store to shared
// memory are in rows 4 apart, whose pitch alone would put them into two groups of four banks.
__device__ __forceinline__ int chunk_at(int row, int chunk) { return chunk ^ (row >> 3 & 3); }

}  // namespace

// values, metadata: of w; values_t, metadata_t: of its transpose, (columns, rows / 2) and so on. The grid has
// blocks_across blocks for each 64 rows, so many that it covers the padding of both metadata.
extern "C" __global__ void __launch_bounds__(THREADS, HALF ? 5 : 3)
prune_tiles(const Element* __restrict__ w, Element* __restrict__ values, unsigned* __restrict__ metadata,
            Element* __restrict__ values_t, unsigned* __restrict__ metadata_t, index_t rows, index_t columns,
            index_t stride, index_t blocks_across) {
  __shared__ __align__(16) Shared shared;
  const unsigned block_row = blockIdx.x / (unsigned)blocks_across;
  const unsigned block_column = blockIdx.x - block_row * (unsigned)blocks_across;
  const int tile_row = threadIdx.x / TILES, tile_column = threadIdx.x % TILES;
  const index_t row = (index_t)block_row * SIDE + tile_row * GROUP;
  const index_t column = (index_t)block_column * SIDE + tile_column * GROUP;
  const bool exists = row < rows && column < columns;  // the whole tile
  Tile tile;
  tile.load(w + row * stride + column, stride, exists);
  if (threadIdx.x < PLACES) {  // while the tile is on its way
    shared.marks[PLACES - 1 - threadIdx.x] = marks_of(threadIdx.x);
    shared.choices[threadIdx.x] = choice_of(threadIdx.x);
  }
  __syncthreads();  // the tables are written
  Key keys[PLACES];
  tile.to_keys(keys);
  // A group of which nothing stays has the code that the padding has.
  const unsigned mask = exists ? greedy_mask(keys, shared.marks, gridDim.y) : 0;  // gridDim.y is 1
  const unsigned mask_t = transposed(mask);
  shared.masks[0][tile_row][tile_column] = (unsigned short)mask;
  shared.masks[1][tile_column][tile_row] = (unsigned short)mask_t;
  if (exists) {
    Element* to = values + row * (columns / 2) + column / 2;
#pragma unroll
    for (int i = 0; i < GROUP; ++i, to += columns / 2)
      *reinterpret_cast<Pair*>(to) = tile.pair(i, mask, shared.choices);
  }
  const Tile tile_t = tile.transposed();
  const int chunk = chunk_at(tile_column * GROUP, tile_row / CHUNK_PAIRS);
#pragma unroll
  for (int i = 0; i < GROUP; ++i)
    shared.transposed[tile_column * GROUP + i][chunk * CHUNK_PAIRS + tile_row % CHUNK_PAIRS] =
        tile_t.pair(i, mask_t, shared.choices);
  __syncthreads();  // masks and values of all tiles are written
#pragma unroll
  for (int step = 0; step < SIDE * CHUNKS / THREADS; ++step) {
    const int k = step * THREADS + threadIdx.x;
    const int down = k / CHUNKS, chunk = k % CHUNKS;
    const index_t at_row = (index_t)block_column * SIDE + down;
    const index_t first = (index_t)block_row * (SIDE / 2) + chunk * VECTOR;
    Element elements[VECTOR];
    memcpy(elements, &shared.transposed[down][chunk_at(down, chunk) * CHUNK_PAIRS], 16);
    if (at_row < columns) store(values_t + at_row * (rows / 2) + first, elements, rows / 2 - first);
  }
  // Half of the block writes the metadata of w, half that of its transpose: a thread a word.
  const int side = threadIdx.x / (THREADS / 2), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const index_t row_block = (index_t)(side ? block_column : block_row) * (SIDE / 16) + warp;
  const index_t column_block = side ? block_row : block_column;
  const index_t row_blocks = ((side ? columns : rows) + 127) / 128 * 8;
  if (row_block >= row_blocks || column_block * SIDE >= (side ? rows : columns)) return;
  // Row lane / 4 of the 16 is row lane / 4 % 4 of a tile; 8 rows further are two tiles.
  unsigned bytes[4];  // two groups each
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned tiles[2];  // masks of four tiles beside each other
    memcpy(tiles, &shared.masks[side][warp * 4 + lane / 16 + half * 2][lane % 4 * 4], 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned groups = tiles[i] >> lane / 4 % 4 * GROUP & 0x000f000f;
      bytes[half * 2 + i] = groups | groups >> 12;
    }
  }
  const unsigned masks = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040),
                                     __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
  (side ? metadata_t : metadata)[(column_block * row_blocks + row_block) * 32 + lane] = codes_of(masks);
}
