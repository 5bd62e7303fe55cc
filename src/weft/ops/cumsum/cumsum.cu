// The cumulative sum along rows in one pass: each element is read once and written once.
//
// A thread has UNROLL vectors of VEC elements, which lie a warp's width of vectors apart, so that every
// access of a warp is contiguous. Sums go up a fixed tree: the elements of a vector one after another, the
// vectors of a warp by shuffles, the warps of a block in shared memory, and the tiles of a row by
// `sum_before`. No sum is ever subtracted, so that an Inf reaches the outputs after it alone. Accumulation
// is in float.
//
// cumsum_rows: a group of lanes for each row, for short rows. cumsum_tiles: a block for each tile of a row
// (Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", NVR-2016-002).
// Bytes: n read, n written; 8 for each tile in addition.
#include "numeric.cuh"
#include "published_word.cuh"
#include "reduce.cuh"

#ifndef REVERSE
#define REVERSE 0  // 1: sums run from the last column to the first
#endif
#ifndef VEC_WIDTH
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#endif
#ifndef THREADS
#define THREADS 256
#endif

constexpr int VEC = VEC_WIDTH;
constexpr int UNROLL = 64 / (VEC * (int)sizeof(WEFT_T));  // 64 bytes for each thread, whatever the vectors
constexpr int WARPS = THREADS / 32;
constexpr index_t TILE_VECS = THREADS * UNROLL;
constexpr unsigned ALL = 0xffffffffu;
constexpr unsigned READY = 1;
using Pack = Vector<WEFT_T, VEC>;

// Addresses of a row count in scan order: position 0 is the first that is added.
__device__ __forceinline__ index_t offset_of(index_t position, int size, index_t n) {
  return REVERSE ? n - size - position : position;
}

// Loads vectors first, first + step, ... of a row of n elements; elements past its end are 0.
__device__ __forceinline__ void load_vecs(float (&v)[UNROLL][VEC], const WEFT_T* row, index_t first, int step,
                                          index_t n) {
  // All loads of a whole part are issued before the first is used; a test beside each would prevent that.
  if ((first + (UNROLL - 1) * step + 1) * VEC <= n) {
    Pack packs[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      packs[i] = *reinterpret_cast<const Pack*>(row + offset_of((first + i * step) * VEC, VEC, n));
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
#pragma unroll
      for (int j = 0; j < VEC; ++j) v[i][j] = element(packs[i], REVERSE ? VEC - 1 - j : j);
    return;
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const index_t position = (first + i * step) * VEC + j;
      v[i][j] = position < n ? to_float(row[offset_of(position, 1, n)]) : 0.0f;
    }
}

// Returns output j of a vector: `before` is the sum of everything before the vector.
__device__ __forceinline__ WEFT_T output(const float (&v)[VEC], int j, float before, bool exclusive) {
  const float own = exclusive ? (j ? v[j - 1] : 0.0f) : v[j];
  return from_float<WEFT_T>(before + own);
}

__device__ __forceinline__ void store_vecs(const float (&v)[UNROLL][VEC], const float (&before)[UNROLL],
                                           float start, bool exclusive, WEFT_T* row, index_t first, int step,
                                           index_t n) {
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const index_t position = (first + i * step) * VEC;
    if (position + VEC <= n) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < VEC; ++j)
        pack.at[REVERSE ? VEC - 1 - j : j] = output(v[i], j, start + before[i], exclusive);
      *reinterpret_cast<Pack*>(row + offset_of(position, VEC, n)) = pack;
    } else {
#pragma unroll
      for (int j = 0; j < VEC; ++j)
        if (position + j < n)
          row[offset_of(position + j, 1, n)] = output(v[i], j, start + before[i], exclusive);
    }
  }
}

// Turns the elements of each vector into sums from the vector's start, sets `before[i]` to the sum of the
// group's elements before vector i, and returns the sum of all in every lane of the group. `lanes` is a
// power of two up to 32; all 32 lanes of the warp take part.
__device__ __forceinline__ float scan_vecs(float (&v)[UNROLL][VEC], float (&before)[UNROLL], int lanes) {
  const int lane = threadIdx.x & (lanes - 1);
  float carry = 0.0f;
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
#pragma unroll
    for (int j = 1; j < VEC; ++j) v[i][j] += v[i][j - 1];
    float total = v[i][VEC - 1];
    for (int step = 1; step < lanes; step *= 2) {
      const float left = __shfl_up_sync(ALL, total, step, lanes);
      if (lane >= step) total += left;
    }
    // The lane to the left has the sum before this one. total - v would be NaN where v is Inf.
    const float left = __shfl_up_sync(ALL, total, 1, lanes);
    before[i] = carry + (lane ? left : 0.0f);
    carry += __shfl_sync(ALL, total, lanes - 1, lanes);
  }
  return carry;
}

// x: (rows, columns), rows at x_stride elements; y: (rows, columns) contiguous. A row has `lanes`
// neighbouring lanes, which walk along it.
extern "C" __global__ void __launch_bounds__(THREADS)
cumsum_rows(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t rows, index_t columns,
            index_t x_stride, index_t lanes, index_t exclusive) {
  const int group = (int)lanes, lane = threadIdx.x & (group - 1);
  const index_t row = (index_t)blockIdx.x * (THREADS / group) + threadIdx.x / group;
  // A group without a row goes on with no elements: the shuffles name all lanes of its warp.
  const index_t n = row < rows ? columns : 0;
  float carry = 0.0f;
  for (index_t first = lane; (first - lane) * VEC < columns; first += group * UNROLL) {
    float v[UNROLL][VEC], before[UNROLL];
    load_vecs(v, x + row * x_stride, first, group, n);
    const float sum = scan_vecs(v, before, group);
    store_vecs(v, before, carry, exclusive, y + row * columns, first, group, n);
    carry += sum;
  }
}

// Returns the sum of the tiles before `tile` in its row, to every lane of the calling warp; `sum` is the
// tile's own. `words`: one for each tile of the row, then one for each group of 32 tiles, then one for each
// super-group of 32 groups; all are 0 before the launch.
//
// The first two kinds are sums of a tile and of a group, the third is the sum of the row up to the
// super-group's end. A tile adds the sums of the tiles before it in its group, of the groups before that in
// its super-group, and of all super-groups before. So the order of the additions follows from the tile's
// number alone, where a look-back that takes the prefixes that it finds gives other bits in each run. Only
// super-groups wait for each other in a chain, one link for 1024 tiles.
__device__ __forceinline__ float sum_before(Word* words, index_t tiles, index_t tile, float sum) {
  const int lane = threadIdx.x % 32, in_group = (int)(tile % 32), in_super = (int)(tile / 32 % 32);
  const index_t group = tile / 32, super = group / 32;
  Word* group_words = words + tiles;
  Word* super_words = group_words + (tiles + 31) / 32;
  if (lane == 0) publish(words + tile, READY, sum);
  const Word* tile_word = words + (tile - in_group) + lane;
  const float tiles_before = warp_sum(lane < in_group ? sum_of(wait_for_word(tile_word)) : 0.0f);
  const float group_sum = tiles_before + sum;  // complete in the last tile of a group
  // Published before this tile waits for other groups, which would make the groups a chain too.
  if (lane == 0 && in_group == 31) publish(group_words + group, READY, group_sum);
  const Word* group_word = group_words + (group - in_super) + lane;
  const float groups_before = warp_sum(lane < in_super ? sum_of(wait_for_word(group_word)) : 0.0f);
  const float supers_before = super ? sum_of(wait_for_word(super_words + super - 1)) : 0.0f;
  if (lane == 0 && in_group == 31 && in_super == 31)
    publish(super_words + super, READY, supers_before + (groups_before + group_sum));
  return supers_before + (groups_before + tiles_before);
}

// x, y as above; words: a counter, and for each row the words of `sum_before`, `row_words` in number, all 0.
// The grid has a block for each of the `tiles` tiles of each row.
extern "C" __global__ void __launch_bounds__(THREADS)
cumsum_tiles(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, Word* words, index_t columns,
             index_t x_stride, index_t tiles, index_t row_words, index_t exclusive) {
  __shared__ index_t ticket[1];
  __shared__ float totals[WARPS];
  __shared__ float prefix[1];
  // Blocks take tiles in the order in which they start, which need not be that of blockIdx: all tiles that
  // this block waits for then belong to blocks that already run.
  if (threadIdx.x == 0) ticket[0] = (index_t)atomicAdd(words, 1ull);
  __syncthreads();
  const index_t row = ticket[0] / tiles, tile = ticket[0] % tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t first = tile * TILE_VECS + warp * 32 * UNROLL + lane;
  float v[UNROLL][VEC], before[UNROLL];
  load_vecs(v, x + row * x_stride, first, 32, columns);
  const float own = scan_vecs(v, before, 32);
  if (lane == 0) totals[warp] = own;
  __syncthreads();
  float warps_before = 0.0f, sum = 0.0f;
#pragma unroll
  for (int k = 0; k < WARPS; ++k) {
    if (k == warp) warps_before = sum;
    sum += totals[k];
  }
  if (warp == 0) {
    const float tiles_before = sum_before(words + 1 + row * row_words, tiles, tile, sum);
    if (lane == 0) prefix[0] = tiles_before;
  }
  __syncthreads();
  store_vecs(v, before, prefix[0] + warps_before, exclusive, y + row * columns, first, 32, columns);
}
