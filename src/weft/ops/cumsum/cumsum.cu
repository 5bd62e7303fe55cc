// The cumulative sum along rows in one pass: each element is read once and written once.
//
// A thread has UNROLL vectors of VEC elements, which lie a warp's width of vectors apart, so that every
// access of a warp is contiguous. Sums go up a fixed tree: the elements of a vector one after another, the
// vectors of a warp by shuffles, the warps of a block in shared memory, and the tiles of a row by
// `sum_before`. No sum is ever subtracted, so that an Inf reaches the outputs after it alone. Accumulation
// is in float.
//
// cumsum_rows: a group of lanes for each row, for short rows. cumsum_tiles: blocks that take tiles of rows
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
#ifndef THREAD_BYTES
#define THREAD_BYTES 64  // of a row in each thread, whatever the vectors
#endif

constexpr int VEC = VEC_WIDTH;
constexpr int UNROLL = THREAD_BYTES / (VEC * (int)sizeof(WEFT_T));
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

// The sums of a row's tiles are published in three kinds of words: one for each tile of the row, then one for
// each group of 32 tiles, then one for each super-group of 32 groups. All are 0 before the launch. The first
// two kinds are sums of a tile and of a group, the third is the sum of the row up to the super-group's end.
// So the order of the additions follows from the tile's number alone, where a look-back that takes the
// prefixes that it finds gives other bits in each run. Only super-groups wait for each other in a chain, one
// link for 1024 tiles.
struct Position {
  Word *tile_words, *group_words, *super_words;  // of the tile's group, of its super-group, of the row
  int in_group, in_super;
  index_t super;

  __device__ __forceinline__ Position(Word* words, index_t tiles, index_t tile)
      : in_group((int)(tile % 32)), in_super((int)(tile / 32 % 32)), super(tile / 1024) {
    tile_words = words + (tile - in_group);
    group_words = words + tiles + super * 32;
    super_words = words + tiles + (tiles + 31) / 32;
  }

  // Sums of earlier tiles of the group, of earlier groups of the super-group, and of all super-groups before,
  // in every lane of the calling warp.
  __device__ __forceinline__ float tiles_before() const {
    const int lane = threadIdx.x % 32;
    return warp_sum(lane < in_group ? sum_of(wait_for_word(tile_words + lane)) : 0.0f);
  }
  __device__ __forceinline__ float groups_before() const {
    const int lane = threadIdx.x % 32;
    return warp_sum(lane < in_super ? sum_of(wait_for_word(group_words + lane)) : 0.0f);
  }
  __device__ __forceinline__ float supers_before() const {
    return super ? sum_of(wait_for_word(super_words + super - 1)) : 0.0f;
  }

  // Publishes a tile's sum, by one warp; the last tile of a group and of a super-group publish theirs too.
  __device__ __forceinline__ void announce(float sum) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) publish(tile_words + in_group, READY, sum);
    if (in_group < 31) return;
    const float group_sum = tiles_before() + sum;
    // Before this tile waits for other groups, which would make the groups a chain too.
    if (lane == 0) publish(group_words + in_super, READY, group_sum);
    if (in_super < 31) return;
    const float super_sum = groups_before() + group_sum;
    const float before = supers_before();
    if (lane == 0) publish(super_words + super, READY, before + super_sum);
  }

  // Returns the sum of the row before the tile.
  __device__ __forceinline__ float sum_before() const {
    const float tiles = tiles_before(), groups = groups_before();
    return supers_before() + (groups + tiles);
  }
};

// x, y as above; words: a counter, and for each row the words of Position, `row_words` in number, all 0.
// `count` tiles are distributed, `tiles` of each row, by a counter: a block takes the next one when it has
// time. Tiles are taken in order by blocks that run, and a block deals with its own in order, so that whoever
// is waited for always goes on; the order of blockIdx would not guarantee that.
//
// In each turn a block loads the next tile and publishes its sum, and only then finishes the current one, for
// which the sums before have arrived in the meantime.
extern "C" __global__ void __launch_bounds__(THREADS)
cumsum_tiles(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, Word* words, index_t columns,
             index_t x_stride, index_t tiles, index_t row_words, index_t count, index_t exclusive) {
  __shared__ index_t tickets[2];
  __shared__ float totals[2][WARPS];
  __shared__ float prefix[1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t thread_first = warp * 32 * UNROLL + lane;
  float current_v[UNROLL][VEC], current_before[UNROLL];
  index_t current = -1, ahead = 0;
  float current_warps = 0.0f;  // the sum of the warps before this one
  if (threadIdx.x == 0) ahead = (index_t)atomicAdd(words, 1ull);
  for (int turn = 0;; turn ^= 1) {
    if (threadIdx.x == 0) {
      tickets[turn] = ahead;
      // The answer takes as long as a load; it is needed in the next turn.
      ahead = (index_t)atomicAdd(words, 1ull);
    }
    __syncthreads();
    const index_t next = tickets[turn];
    float v[UNROLL][VEC], before[UNROLL], warps_before = 0.0f;
    if (next < count) {
      const index_t row = next / tiles, tile = next % tiles;
      load_vecs(v, x + row * x_stride, tile * TILE_VECS + thread_first, 32, columns);
      const float own = scan_vecs(v, before, 32);
      if (lane == 0) totals[turn][warp] = own;
      __syncthreads();
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < WARPS; ++k) {
        if (k == warp) warps_before = sum;
        sum += totals[turn][k];
      }
      if (warp == 0) Position(words + 1 + row * row_words, tiles, tile).announce(sum);
    }
    if (current >= 0) {
      const index_t row = current / tiles, tile = current % tiles;
      if (warp == 0) {
        const float tiles_before = Position(words + 1 + row * row_words, tiles, tile).sum_before();
        if (lane == 0) prefix[0] = tiles_before;
      }
      __syncthreads();
      store_vecs(current_v, current_before, prefix[0] + current_warps, exclusive, y + row * columns,
                 tile * TILE_VECS + thread_first, 32, columns);
    }
    if (next >= count) return;
    current = next;
    current_warps = warps_before;
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      current_before[i] = before[i];
#pragma unroll
      for (int j = 0; j < VEC; ++j) current_v[i][j] = v[i][j];
    }
  }
}
