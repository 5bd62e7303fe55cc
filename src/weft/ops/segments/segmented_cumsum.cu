// The cumulative sum of rows that begins anew at heads, in one pass: each element is read and written once.
//
// It is a scan of pairs (a head was met, the sum since it) with the operator (a, s)(b, t) = (a or b, b ? t :
// s + t). Pairs go up the fixed tree of ../cumsum/cumsum.cu: the elements of a vector, the vectors of a warp
// by shuffles, the warps of a block, and the tiles of a row by words that blocks publish. Sums on the other
// side of a head are left out by a selection; multiplied by 0 or subtracted, an Inf or NaN would leave its
// segment. Accumulation is in float.
//
// mark_heads: a bit for each element that begins a segment in the order of the scan. segmented_tiles: blocks
// that take tiles; see tile_scan.cuh. Bytes: n elements read and written, n / 8 of bits, the offsets; 8 for
// each tile.
#include "tile_scan.cuh"

constexpr unsigned AFTER_HEAD = 3;  // flag of the word of a sum that begins at a head; READY: of the others
constexpr int NO_HEAD = 0x7fffffff;
// Bit HEAD_START + p is that of position p: a row's first part begins up to VEC - 1 positions before 0, and
// copies of bits begin at multiples of 16 bytes.
constexpr int HEAD_START = 128;
constexpr int WARP_ELEMENTS = 32 * UNROLL * VEC;  // of a tile, a multiple of 128
constexpr int HEAD_WORDS = WARP_ELEMENTS / 32 + HEAD_START / 32;  // of a warp's bits of a tile

struct Pair {
  int first_head;  // the vector, counted in the tile, that has the first head; later any number, or NO_HEAD
  float sum;       // since the last head
};

// offsets: (count,); bits: words, all 0 before the launch. Sets bit HEAD_START + p of each position p, in
// scan order, at which a segment begins. Where a scan is reversed, a segment begins at its end.
extern "C" __global__ void __launch_bounds__(THREADS)
mark_heads(const index_t* __restrict__ offsets, unsigned* __restrict__ bits, index_t count, index_t n) {
  const index_t i = (index_t)blockIdx.x * THREADS + threadIdx.x;
  const index_t position = i < count ? (REVERSE ? n - offsets[i] : offsets[i]) : -1;
  const bool is_inside = position >= 0 && position < n;
  const index_t at = position + HEAD_START;
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

// Returns the sums of a vector's elements from its first one, or from the last head, in scan order.
__device__ __forceinline__ void sums_in_vec(const Pack& pack, unsigned heads, float (&sums)[VEC]) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const float value = element(pack, REVERSE ? VEC - 1 - j : j);
    sums[j] = j == 0 || heads >> j & 1u ? value : sums[j ? j - 1 : 0] + value;
  }
}

// Returns the last lane of a mask, or 0 if it is empty.
__device__ __forceinline__ int last_of(unsigned lanes) { return lanes ? 31 - __clz((int)lanes) : 0; }

// The sum of those words that follow the last head among a warp's first `count`.
struct Suffix {
  bool has_head, is_missing;  // is_missing: a word after the last head that is known has not been published
  float sum;

  __device__ __forceinline__ Suffix(Word word, bool is_there) {
    const int lane = (int)threadIdx.x % 32;
    const unsigned heads = __ballot_sync(ALL, flag_of(word) == AFTER_HEAD);
    const bool counts = is_there && lane >= last_of(heads);
    has_head = heads != 0;
    is_missing = __ballot_sync(ALL, counts && word == 0) != 0;
    sum = warp_sum(counts ? ::sum_of(word) : 0.0f);
  }
};

struct Scan {
  using Sum = Pair;
  const unsigned* bits;  // of mark_heads
  unsigned* heads;       // SLOTS x WARPS x HEAD_WORDS in shared memory: bits of a block's tiles
  int* first_heads;      // DELAY + 1 in shared memory: Pair::first_head of tiles
  bool exclusive;

  static __device__ __forceinline__ Pair nothing() { return {NO_HEAD, 0.0f}; }
  static __device__ __forceinline__ Pair join(const Pair& left, const Pair& right) {
    return {min(left.first_head, right.first_head),
            right.first_head != NO_HEAD ? right.sum : left.sum + right.sum};
  }
  static __device__ __forceinline__ float value(const Pair& p) { return p.sum; }
  static __device__ __forceinline__ Word word(const Pair& p) {
    return (Word)(p.first_head != NO_HEAD ? AFTER_HEAD : READY) << 32 | __float_as_uint(p.sum);
  }
  static __device__ __forceinline__ Pair sum_of(Word word) {
    return {flag_of(word) == AFTER_HEAD ? 0 : NO_HEAD, ::sum_of(word)};
  }
  static __device__ __forceinline__ Pair sum_of_lanes(const Pair& p) {
    const Suffix suffix(word(p), true);
    return {suffix.has_head ? 0 : NO_HEAD, suffix.sum};
  }

  // Only words after the last head are waited for: where segments are short, that of one tile. Which words
  // are added follows from the heads, never from what other blocks have done.
  static __device__ __forceinline__ float sum_before(const Position& p) {
    const int lane = threadIdx.x % 32;
    const bool tile = lane < p.in_group, group = lane < p.in_super;
    Word tile_word = 0, group_word = 0, super_word = 0;
    for (;;) {
      if (tile) tile_word = load_word(p.tile_words + lane);
      if (group) group_word = load_word(p.group_words + lane);
      if (p.super) super_word = load_word(p.super_words + p.super - 1);
      __syncwarp();
      const Suffix tiles(tile_word, tile);
      if (tiles.is_missing) continue;
      if (tiles.has_head) return tiles.sum;
      const Suffix groups(group_word, group);
      if (groups.is_missing) continue;
      if (groups.has_head) return groups.sum + tiles.sum;
      const bool is_missing = p.super && super_word == 0;
      if (!__ballot_sync(ALL, is_missing)) return ::sum_of(super_word) + (groups.sum + tiles.sum);
    }
  }

  // A warp copies the bits of its own vectors.
  __device__ __forceinline__ void fetch(int slot, const Tile& tile, int) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned* from = bits + (tile.index * TILE + warp * WARP_ELEMENTS) / 32;
    unsigned* to = heads + (slot * WARPS + warp) * HEAD_WORDS;
    if (lane < HEAD_WORDS / 4) copy_async<16>(shared_address(to + lane * 4), from + lane * 4, 16);
  }

  // Returns a bit for each element of a vector of the tile of a turn, in scan order.
  __device__ __forceinline__ unsigned heads_of(int turn, int vector, int shift) const {
    const int warp = threadIdx.x / 32;
    const unsigned* words = heads + (turn % SLOTS * WARPS + warp) * HEAD_WORDS;
    const int bit = vector * VEC - warp * WARP_ELEMENTS + HEAD_START - shift, word = bit / 32;
    // A shifted vector has bits of two words.
    const Word both = (Word)words[min(word + 1, HEAD_WORDS - 1)] << 32 | words[word];
    return (unsigned)(both >> bit % 32) & ((1u << VEC) - 1);
  }

  __device__ __forceinline__ Pair sums(const Pack (&packs)[UNROLL], Pair (&before)[UNROLL], int first,
                                       int turn, int shift) const {
    const int lane = threadIdx.x % 32;
    Pair carry = nothing();
    __syncwarp();  // the lanes' copies of bits have arrived
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const unsigned own = heads_of(turn, first + i * 32, shift);
      float in_vec[VEC];
      sums_in_vec(packs[i], own, in_vec);
      float total = in_vec[VEC - 1];
      // One vote instead of a head in every shuffle: a lane adds lanes from the last head on.
      const unsigned lanes = __ballot_sync(ALL, own != 0), earlier = lanes & ((1u << lane) - 1);
      const int begin = own ? lane : last_of(earlier);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float left = __shfl_up_sync(ALL, total, step);
        if (lane - step >= begin) total += left;
      }
      const float left = __shfl_up_sync(ALL, total, 1), last = __shfl_sync(ALL, total, 31);
      const float in_warp = lane ? left : 0.0f;
      before[i] = {earlier ? 0 : carry.first_head, earlier ? in_warp : carry.sum + in_warp};
      const int first_lane = last_of(lanes & (~lanes + 1));
      carry = join(carry, {lanes ? first - lane + i * 32 + first_lane : NO_HEAD, last});
    }
    return carry;
  }

  __device__ __forceinline__ void keep(int turn, const Pair& sum) const {
    first_heads[turn % (DELAY + 1)] = sum.first_head;
  }

  __device__ __forceinline__ Pack outputs(const Pack& pack, float before, float start, int vector, int turn,
                                          int shift) const {
    const unsigned own = heads_of(turn, vector, shift);
    if (vector <= first_heads[turn % (DELAY + 1)]) before = start + before;  // no head comes before it
    float sums[VEC];
    sums_in_vec(pack, own, sums);
    Pack out;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      // No head counts that comes after the element.
      const bool has_head = own & ((exclusive ? 1u : 2u) << j) - 1;
      const float in_vec = exclusive ? (j ? sums[j ? j - 1 : 0] : 0.0f) : sums[j];
      float sum = has_head ? in_vec : before + in_vec;
      if (exclusive && own >> j & 1u) sum = 0.0f;
      out.at[REVERSE ? VEC - 1 - j : j] = from_float<WEFT_T>(sum);
    }
    return out;
  }
};

// x, y, words and sizes: as in scan_tiles; bits: of mark_heads, the same for all rows. Dynamic shared memory:
// as in scan_tiles, then the bits of SLOTS tiles.
extern "C" __global__ void __launch_bounds__(THREADS + 64, SCAN_BLOCKS)
segmented_tiles(const WEFT_T* __restrict__ x, const unsigned* __restrict__ bits, WEFT_T* __restrict__ y,
                Word* words, index_t columns, index_t x_stride, index_t tiles, index_t row_words,
                index_t count, index_t exclusive) {
  extern __shared__ Pack slots[];
  __shared__ Tile tickets[SLOTS];
  __shared__ Pair totals[WARPS];
  __shared__ float prefix[1];
  __shared__ int first_heads[DELAY + 1];
  unsigned* heads = reinterpret_cast<unsigned*>(slots + SLOTS * UNROLL * THREADS);
  scan_tiles(Scan{bits, heads, first_heads, exclusive != 0}, x, y, words, columns, x_stride, tiles, row_words,
             count, slots, tickets, totals, prefix);
}
