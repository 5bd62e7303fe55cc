// The cumulative sum of rows that begins anew at heads, in one pass: each element is read and written once.
//
// It is a scan of pairs (a head was met, the sum since it) with the operator (a, s)(b, t) = (a or b, b ? t :
// s + t). Pairs go up the fixed tree of ../cumsum/cumsum.cu: the elements of a vector, the vectors of a warp
// by shuffles, the warps of a block, and the tiles of a row by words that blocks publish. Sums on the other
// side of a head are left out by a selection; multiplied by 0 or subtracted, an Inf or NaN would leave its
// segment. Accumulation is in float.
//
// mark_heads: a bit for each element that begins a segment in the order of the scan. segmented_tiles: blocks
// that take tiles. Bytes: n elements read and written, n / 8 of bits, the offsets; 8 for each tile.
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
constexpr unsigned SUM_ALONE = 1, AFTER_HEAD = 3;  // flags of a published word
using Pack = Vector<WEFT_T, VEC>;

struct Pair {
  bool has_head;
  float sum;
};

// Returns the pair of `left` followed by `right`.
__device__ __forceinline__ Pair join(Pair left, Pair right) {
  return {left.has_head || right.has_head, right.has_head ? right.sum : left.sum + right.sum};
}
__device__ __forceinline__ Pair shift_up(Pair p, int step) {
  return {__shfl_up_sync(ALL, (unsigned)p.has_head, step) != 0, __shfl_up_sync(ALL, p.sum, step)};
}
__device__ __forceinline__ Pair from_lane(Pair p, int lane) {
  return {__shfl_sync(ALL, (unsigned)p.has_head, lane) != 0, __shfl_sync(ALL, p.sum, lane)};
}
__device__ __forceinline__ void publish(Word* to, Pair p) {
  publish(to, p.has_head ? AFTER_HEAD : SUM_ALONE, p.sum);
}
__device__ __forceinline__ Pair pair_of(Word word) { return {flag_of(word) == AFTER_HEAD, sum_of(word)}; }

// offsets: (count,); bits: (n / 32 + 1,) words, all 0 before the launch. Sets the bit of each element at
// offsets[i] - shift: with shift 1 the last element of each segment, which a reversed scan meets first.
extern "C" __global__ void __launch_bounds__(THREADS)
mark_heads(const index_t* __restrict__ offsets, unsigned* __restrict__ bits, index_t count, index_t n,
           index_t shift) {
  const index_t i = (index_t)blockIdx.x * THREADS + threadIdx.x;
  const index_t at = i < count ? offsets[i] - shift : -1;
  const bool is_inside = at >= 0 && at < n;
  const int lane = (int)threadIdx.x % 32;
  // Offsets rise, so that lanes of one word are neighbours. One of them writes for all: 32 atomic operations
  // on a word would take turns. A word has 32 bits of a number below 2^36.
  const unsigned word = is_inside ? (unsigned)(at >> 5) : 0xffffffffu;
  unsigned mask = is_inside ? 1u << (at & 31) : 0u;
  for (int step = 1; step < 32; step *= 2) {
    const unsigned left_word = __shfl_up_sync(ALL, word, step), left_mask = __shfl_up_sync(ALL, mask, step);
    if (lane >= step && left_word == word) mask |= left_mask;
  }
  const unsigned right_word = __shfl_sync(ALL, word, (lane + 1) % 32);
  if (is_inside && (lane == 31 || right_word != word)) atomicOr(bits + word, mask);
}

// Addresses of a row count in scan order: position 0 is the first that is added.
__device__ __forceinline__ index_t offset_of(index_t position, int size, index_t n) {
  return REVERSE ? n - size - position : position;
}

// Loads vectors first, first + 32, ... of a row of n elements, and a bit for each that is a head; elements
// past the row's end are 0 and no heads.
__device__ __forceinline__ void load_vecs(float (&v)[UNROLL][VEC], unsigned (&heads)[UNROLL],
                                          const WEFT_T* row, const unsigned* bits, index_t first,
                                          index_t n) {
  // All loads of a whole part are issued before the first is used; a test beside each would prevent that.
  if ((first + (UNROLL - 1) * 32 + 1) * VEC <= n) {
    Pack packs[UNROLL];
    unsigned words[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const index_t at = offset_of((first + i * 32) * VEC, VEC, n);
      packs[i] = *reinterpret_cast<const Pack*>(row + at);
      // A vector begins at a multiple of its size, so that its bits are in one word.
      words[i] = bits[at >> 5] >> (at & 31);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      heads[i] = REVERSE ? __brev(words[i] << (32 - VEC)) : words[i] & ((1u << VEC) - 1);
#pragma unroll
      for (int j = 0; j < VEC; ++j) v[i][j] = element(packs[i], REVERSE ? VEC - 1 - j : j);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    heads[i] = 0;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const index_t position = (first + i * 32) * VEC + j, at = offset_of(position, 1, n);
      v[i][j] = position < n ? to_float(row[at]) : 0.0f;
      if (position < n) heads[i] |= (bits[at >> 5] >> (at & 31) & 1u) << j;
    }
  }
}

// Turns the elements of each vector into sums from the vector's start or its last head, sets `before[i]` to
// the pair of the warp's elements before vector i, and returns the pair of all in every lane.
__device__ __forceinline__ Pair scan_vecs(float (&v)[UNROLL][VEC], const unsigned (&heads)[UNROLL],
                                          Pair (&before)[UNROLL]) {
  const int lane = (int)threadIdx.x % 32;
  Pair carry = {false, 0.0f};
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
#pragma unroll
    for (int j = 1; j < VEC; ++j) v[i][j] = heads[i] >> j & 1u ? v[i][j] : v[i][j] + v[i][j - 1];
    Pair total = {heads[i] != 0, v[i][VEC - 1]};
    for (int step = 1; step < 32; step *= 2) {
      const Pair left = shift_up(total, step);
      if (lane >= step) total = join(left, total);
    }
    const Pair left = shift_up(total, 1);
    before[i] = lane ? join(carry, left) : carry;
    carry = join(carry, from_lane(total, 31));
  }
  return carry;
}

// Returns output j of a vector: `start` is the sum of its segment before the vector. No head counts that
// comes after the element.
__device__ __forceinline__ WEFT_T output(const float (&v)[VEC], unsigned heads, int j, float start,
                                         bool exclusive) {
  if (!exclusive) return from_float<WEFT_T>(heads & (2u << j) - 1 ? v[j] : start + v[j]);
  if (heads >> j & 1u) return from_float<WEFT_T>(0.0f);
  const float own = j ? v[j ? j - 1 : 0] : 0.0f;
  return from_float<WEFT_T>(heads & (1u << j) - 1 ? own : start + own);
}

__device__ __forceinline__ void store_vecs(const float (&v)[UNROLL][VEC], const unsigned (&heads)[UNROLL],
                                           const Pair (&before)[UNROLL], Pair block_before, bool exclusive,
                                           WEFT_T* row, index_t first, index_t n) {
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const index_t position = (first + i * 32) * VEC;
    const float start = join(block_before, before[i]).sum;
    if (position + VEC <= n) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < VEC; ++j)
        pack.at[REVERSE ? VEC - 1 - j : j] = output(v[i], heads[i], j, start, exclusive);
      *reinterpret_cast<Pack*>(row + offset_of(position, VEC, n)) = pack;
    } else {
#pragma unroll
      for (int j = 0; j < VEC; ++j)
        if (position + j < n)
          row[offset_of(position + j, 1, n)] = output(v[i], heads[i], j, start, exclusive);
    }
  }
}

// The words of a row: one for each tile, for each group of 32 tiles, and for each super-group of 32 groups.
// All are 0 before the launch. The first two kinds are pairs of a tile and of a group, the third is the pair
// of the row up to the super-group's end. Which of them a tile adds, and in which order, follows from its
// number and the heads, never from what other blocks have done. ../cumsum/cumsum.cu says more.
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

  // Returns the pair of the first `count` words, fewer than 32, in every lane of the calling warp. Sums
  // before the last head are left out.
  static __device__ __forceinline__ Pair pair_of_words(const Word* words, int count) {
    const int lane = (int)threadIdx.x % 32;
    const Pair own = lane < count ? pair_of(wait_for_word(words + lane)) : Pair{false, 0.0f};
    const unsigned heads = __ballot_sync(ALL, own.has_head);
    const int last = heads ? 31 - __clz((int)heads) : 0;
    return {heads != 0, warp_sum(lane >= last ? own.sum : 0.0f)};
  }
  __device__ __forceinline__ Pair tiles_before() const { return pair_of_words(tile_words, in_group); }
  __device__ __forceinline__ Pair groups_before() const { return pair_of_words(group_words, in_super); }
  __device__ __forceinline__ Pair supers_before() const {
    return super ? pair_of(wait_for_word(super_words + super - 1)) : Pair{false, 0.0f};
  }

  // Publishes a tile's pair, by one warp; the last tile of a group and of a super-group publish theirs too.
  __device__ __forceinline__ void announce(Pair own) const {
    const int lane = (int)threadIdx.x % 32;
    if (lane == 0) publish(tile_words + in_group, own);
    if (in_group < 31) return;
    const Pair group = join(tiles_before(), own);
    // Before this tile waits for other groups, which would make the groups a chain too.
    if (lane == 0) publish(group_words + in_super, group);
    if (in_super < 31) return;
    const Pair of_super = join(groups_before(), group);
    // A super-group with a head has no use for those before it, and does not wait for them.
    const Pair whole = of_super.has_head ? of_super : join(supers_before(), of_super);
    if (lane == 0) publish(super_words + super, whole);
  }

  // Returns the pair of the row before the tile.
  __device__ __forceinline__ Pair pair_before() const {
    Pair before = tiles_before();
    if (!before.has_head) before = join(groups_before(), before);
    if (!before.has_head) before = join(supers_before(), before);
    return before;
  }
};

// x: (rows, columns), rows at x_stride elements; y: (rows, columns) contiguous; bits: the heads of any row;
// words: a counter, and for each row the words of Position, `row_words` in number, all 0. `count` tiles are
// distributed, `tiles` of each row, by a counter: whoever is waited for then runs, and goes on.
extern "C" __global__ void __launch_bounds__(THREADS)
segmented_tiles(const WEFT_T* __restrict__ x, const unsigned* __restrict__ bits, WEFT_T* __restrict__ y,
                Word* words, index_t columns, index_t x_stride, index_t tiles, index_t row_words,
                index_t count, index_t exclusive) {
  __shared__ index_t tickets[2];
  __shared__ float totals[WARPS];
  __shared__ unsigned total_heads[WARPS];
  __shared__ float prefix[1];
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const index_t thread_first = warp * 32 * UNROLL + lane;
  for (int turn = 0;; turn ^= 1) {
    if (threadIdx.x == 0) tickets[turn] = (index_t)atomicAdd(words, 1ull);
    // Also between the reading of totals and prefix in the turn before and their next contents.
    __syncthreads();
    const index_t ticket = tickets[turn];
    if (ticket >= count) return;
    const index_t row = ticket / tiles, tile = ticket % tiles, first = tile * TILE_VECS + thread_first;
    float v[UNROLL][VEC];
    unsigned heads[UNROLL];
    Pair before[UNROLL];
    load_vecs(v, heads, x + row * x_stride, bits, first, columns);
    const Pair own = scan_vecs(v, heads, before);
    if (lane == 0) totals[warp] = own.sum, total_heads[warp] = own.has_head;
    __syncthreads();
    Pair sum = {false, 0.0f}, warps_before = sum;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) {
      if (k == warp) warps_before = sum;
      sum = join(sum, {total_heads[k] != 0, totals[k]});
    }
    if (warp == 0) {
      const Position position(words + 1 + row * row_words, tiles, tile);
      position.announce(sum);
      const Pair tiles_before = position.pair_before();
      if (lane == 0) prefix[0] = tiles_before.sum;
    }
    __syncthreads();
    store_vecs(v, heads, before, join({false, prefix[0]}, warps_before), exclusive, y + row * columns, first,
               columns);
  }
}
