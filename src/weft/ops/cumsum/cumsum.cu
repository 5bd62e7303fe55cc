// The cumulative sum along rows in one pass: each element is read once and written once.
//
// Sums go up a fixed tree: the elements of a vector one after another, the vectors of a warp by shuffles, the
// warps of a block in shared memory, and the tiles of a row by `sum_before`. No sum is ever subtracted, so
// that an Inf reaches the outputs after it alone. Accumulation is in float.
//
// cumsum_rows: a group of lanes for each row, for short rows. cumsum_tiles: blocks that take tiles of rows;
// see tile_scan.cuh, which has how vectors lie. Bytes: n read, n written; 8 for each tile in addition.
#include "tile_scan.cuh"

// Returns the sums of a vector's elements from its first one, in scan order, to each.
__device__ __forceinline__ void sums_in_vec(const Pack& pack, float (&sums)[VEC]) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const float value = element(pack, REVERSE ? VEC - 1 - j : j);
    sums[j] = j ? sums[j - 1] + value : value;
  }
}

// Sets `before[i]` to the sum of the group's elements before vector i, and returns the sum of all in every
// lane of the group. `lanes` is a power of two up to 32; all 32 lanes of the warp take part.
__device__ __forceinline__ float scan_vecs(const Pack (&packs)[UNROLL], float (&before)[UNROLL], int lanes) {
  const int lane = threadIdx.x & (lanes - 1);
  float carry = 0.0f;
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    float sums[VEC];
    sums_in_vec(packs[i], sums);
    float total = sums[VEC - 1];
    for (int step = 1; step < lanes; step *= 2) {
      const float left = __shfl_up_sync(ALL, total, step, lanes);
      if (lane >= step) total += left;
    }
    // The lane to the left has the sum before this one. total - sum would be NaN where the sum is Inf.
    const float left = __shfl_up_sync(ALL, total, 1, lanes);
    before[i] = carry + (lane ? left : 0.0f);
    carry += __shfl_sync(ALL, total, lanes - 1, lanes);
  }
  return carry;
}

struct Scan {
  using Sum = float;
  bool exclusive;

  static __device__ __forceinline__ float nothing() { return 0.0f; }
  static __device__ __forceinline__ float join(float left, float right) { return left + right; }
  static __device__ __forceinline__ float value(float sum) { return sum; }
  static __device__ __forceinline__ Word word(float sum) { return (Word)READY << 32 | __float_as_uint(sum); }
  static __device__ __forceinline__ float sum_of(Word word) { return ::sum_of(word); }
  static __device__ __forceinline__ float sum_of_lanes(float sum) { return warp_sum(sum); }

  // Returns the sum of the row before the tile, in every lane of the calling warp. The words are asked for
  // together: an answer of L2 takes as long as a tile's arithmetic.
  static __device__ __forceinline__ float sum_before(const Position& p) {
    const int lane = threadIdx.x % 32;
    const bool tile = lane < p.in_group, group = lane < p.in_super;
    Word tile_word = 0, group_word = 0, super_word = 0;
    bool missing;
    do {
      if (tile) tile_word = load_word(p.tile_words + lane);
      if (group) group_word = load_word(p.group_words + lane);
      if (p.super) super_word = load_word(p.super_words + p.super - 1);
      missing = (tile && !tile_word) || (group && !group_word) || (p.super && !super_word);
    } while (missing);
    __syncwarp();
    const float tiles = warp_sum(::sum_of(tile_word)), groups = warp_sum(::sum_of(group_word));
    return ::sum_of(super_word) + (groups + tiles);
  }

  __device__ __forceinline__ void fetch(int, const Tile&, int) const {}
  __device__ __forceinline__ float sums(const Pack (&packs)[UNROLL], float (&before)[UNROLL], int, int,
                                        int) const {
    return scan_vecs(packs, before, 32);
  }
  __device__ __forceinline__ void keep(int, float) const {}

  // Returns the outputs of a vector, whose elements are added up again: they take less registers than their
  // sums.
  __device__ __forceinline__ Pack outputs(const Pack& pack, float before, float start, int, int,
                                          int) const {
    before = start + before;
    float sums[VEC];
    sums_in_vec(pack, sums);
    Pack out;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float own = exclusive ? (j ? sums[j - 1] : 0.0f) : sums[j];
      out.at[REVERSE ? VEC - 1 - j : j] = from_float<WEFT_T>(before + own);
    }
    return out;
  }
};

// x: (rows, columns), rows at x_stride elements; y: (rows, columns) contiguous. A row has `lanes`
// neighbouring lanes, which walk along it.
// With vectors, three blocks an SM: 16-bit elements would take the registers of two, and spill in four.
extern "C" __global__ void __launch_bounds__(THREADS, VEC > 1 ? 3 : 1)
cumsum_rows(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t rows, index_t columns,
            index_t x_stride, index_t lanes, index_t exclusive) {
  const int group = (int)lanes, lane = threadIdx.x & (group - 1);
  const index_t row = (index_t)blockIdx.x * (THREADS / group) + threadIdx.x / group;
  // A group without a row goes on with no elements: the shuffles name all lanes of its warp.
  const index_t n = row < rows ? columns : 0;
  float carry = 0.0f;
  const int part = group * UNROLL * VEC, shift = shift_of(x + row * x_stride, n);
  // As many parts for each row, wherever it begins: the shuffles name all lanes of the warp.
  for (index_t before_shift = 0; before_shift < columns + VEC - 1; before_shift += part) {
    const index_t start = before_shift - shift;
    const int skip = start < 0 ? shift : 0, count = (int)max((index_t)0, min(n - start, (index_t)part));
    Pack packs[UNROLL];
    float before[UNROLL];
    load_vecs(packs, part_of(x + row * x_stride, start, n), lane, group, skip, count);
    const float sum = scan_vecs(packs, before, group);
    WEFT_T* out = part_of(y + row * columns, start, n);
    store_vecs(Scan{exclusive != 0}, packs, before, carry, out, lane, group, skip, count);
    carry += sum;
  }
}

// x, y as above; words, columns, x_stride, tiles, row_words, count: as in scan_tiles.
extern "C" __global__ void __launch_bounds__(THREADS + 64, SCAN_BLOCKS)
cumsum_tiles(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, Word* words, index_t columns,
             index_t x_stride, index_t tiles, index_t row_words, index_t count, index_t exclusive) {
  extern __shared__ Pack slots[];
  __shared__ Tile tickets[SLOTS];
  __shared__ float totals[WARPS];
  __shared__ float prefix[1];
  scan_tiles(Scan{exclusive != 0}, x, y, words, columns, x_stride, tiles, row_words, count, slots, tickets,
             totals, prefix);
}
