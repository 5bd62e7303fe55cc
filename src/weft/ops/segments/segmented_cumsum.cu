// The cumulative sum of rows that begins anew at heads, in one pass: each element is read and written once.
//
// It is a scan of pairs (a head was met, the sum since it) with the operator (a, s)(b, t) = (a or b, b ? t :
// s + t). Pairs go up the fixed tree of ../cumsum/cumsum.cu: the elements of a thread, the threads of a warp
// by shuffles, the warps of a block, and the tiles of a row by words that blocks publish. Sums on the other
// side of a head are left out by a selection; multiplied by 0 or subtracted, an Inf or NaN would leave its
// segment. Accumulation is in float.
//
// mark_heads: a bit for each element that begins a segment in the order of the scan. segmented_tiles: blocks
// that take tiles; see tile_scan.cuh. Bytes: n elements read and written, the offsets read, n / 8 of bits
// written and read; 8 for each tile.
#include "overlap.cuh"
#include "sorted_search.cuh"
#include "tile_scan.cuh"

constexpr unsigned AFTER_HEAD = 3;  // flag of the word of a sum that begins at a head; READY: of the others
constexpr int NO_HEAD = 0x7fffffff;
// Bit HEAD_START + p is that of position p: a row's first part begins up to VEC - 1 positions before 0, and
// copies of bits begin at multiples of 16 bytes.
constexpr int HEAD_START = 128;
constexpr int WARP_ELEMENTS = 32 * ELEMENTS;                            // of a tile, a multiple of 128
constexpr int HEAD_WORDS = WARP_ELEMENTS / 32 + HEAD_START / 32;        // of a warp's bits of a tile
constexpr int MARK_THREADS = 128, SPAN_WORDS = 1024, SPAN = 32 * SPAN_WORDS;  // of a block of mark_heads
constexpr int RUN = 4;                                                  // neighbouring offsets of a thread
static_assert(ELEMENTS <= 32, "a word has a bit for each element of a thread");

struct Pair {
  int first_head;  // the thread that has the first head; later any number, or NO_HEAD
  float sum;       // since the last head
};

// offsets: (count,), rising; bits: (bit_words,), a multiple of 4. Sets bit HEAD_START + p of each position p,
// in scan order, at which a segment begins, and clears all others. Where a scan is reversed, a segment begins
// at its end. Clears words: (word_count,) too. offsets_an_element: the mean.
//
// A block has SPAN bits in shared memory. It searches the offsets that lie in them, so that no bit is cleared
// beforehand and no atomic operation leaves the SM.
extern "C" __global__ void __launch_bounds__(MARK_THREADS)
mark_heads(const index_t* __restrict__ offsets, unsigned* __restrict__ bits, Word* __restrict__ words,
           index_t count, index_t n, index_t bit_words, index_t word_count, double offsets_an_element) {
  using Quad = Vector<unsigned, 4>;
  __shared__ Quad quads[SPAN_WORDS / 4];
  __shared__ index_t limits[2];
  unsigned* span = reinterpret_cast<unsigned*>(quads);
  launch_dependents();
  const index_t thread = (index_t)blockIdx.x * MARK_THREADS + threadIdx.x;
  for (index_t i = thread; i < word_count; i += (index_t)gridDim.x * MARK_THREADS) words[i] = 0;
  const index_t first_word = (index_t)blockIdx.x * SPAN_WORDS;
  if (first_word >= bit_words) return;
  for (int i = threadIdx.x; i < SPAN_WORDS / 4; i += MARK_THREADS) quads[i] = Quad{};
  const index_t first_position = first_word * 32 - HEAD_START;
  if (threadIdx.x < 64) {
    const int end = threadIdx.x / 32;
    const index_t position = max((index_t)0, min(n, first_position + end * SPAN));
    const index_t offset = REVERSE ? n - position + 1 : position;
    const index_t below = count_below(offsets, offset, count, (index_t)(offset * offsets_an_element));
    if (threadIdx.x % 32 == 0) limits[REVERSE ? 1 - end : end] = below;
  }
  __syncthreads();
  const index_t stop = limits[1], in_span = stop - limits[0];
  // More offsets than elements: most are of empty segments. A run of equal ones is not read through.
  const index_t run = in_span > SPAN ? (in_span + SPAN - 1) / SPAN * RUN : RUN;
  for (index_t start = limits[0] + threadIdx.x * run; start < stop; start += MARK_THREADS * run) {
    index_t end = min(start + run, stop);
    if (run > RUN && offsets[start] == offsets[end - 1]) end = start + 1;
    for (index_t i = start; i < end; i += RUN) {
      index_t offset[RUN];
#pragma unroll
      for (int j = 0; j < RUN; ++j) offset[j] = offsets[min(i + j, end - 1)];
      // Neighbours of one word make one operation.
      int word = 0;
      unsigned mask = 0;
#pragma unroll
      for (int j = 0; j < RUN; ++j) {
        const index_t bit = (REVERSE ? n - offset[j] : offset[j]) - first_position;
        if (bit < 0 || bit >= SPAN) continue;  // offsets that do not rise
        if (mask && word != (int)bit / 32) atomicOr(span + word, mask), mask = 0;
        word = (int)bit / 32;
        mask |= 1u << (int)bit % 32;
      }
      if (mask) atomicOr(span + word, mask);
    }
  }
  __syncthreads();
  const int here = (int)min(bit_words - first_word, (index_t)SPAN_WORDS);
  for (int i = threadIdx.x; i < here / 4; i += MARK_THREADS)
    store_pack(bits + first_word + 4 * i, quads[i]);
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
  unsigned* heads;       // (AHEAD + 1) x WARPS x HEAD_WORDS in shared memory: bits of a block's tiles
  unsigned* masks;       // KEPT x THREADS in shared memory: a bit for each element of a thread
  int* first_heads;      // KEPT in shared memory: Pair::first_head of tiles
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

  // A warp copies the bits of its own elements.
  __device__ __forceinline__ void fetch(unsigned turn, const Tile& tile) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned* from = bits + (index_t)tile.index * (TILE / 32) + warp * (WARP_ELEMENTS / 32);
    unsigned* to = heads + (turn % (AHEAD + 1) * WARPS + warp) * HEAD_WORDS;
    if (lane < HEAD_WORDS / 4) copy_async<16>(shared_address(to + lane * 4), from + lane * 4, 16);
  }

  // Returns a bit for each of the thread's elements of the tile of a turn, in scan order.
  __device__ __forceinline__ unsigned heads_of(unsigned turn, int shift) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned* words = heads + (turn % (AHEAD + 1) * WARPS + warp) * HEAD_WORDS;
    const int last = lane * ELEMENTS + HEAD_START - shift + ELEMENTS - 1, word = last / 32;
    // The elements of a shifted row have bits of two words. The last one's bit goes to the top.
    const Word both = (Word)words[word] << 32 | words[word - 1];
    return (unsigned)(both << (31 - last % 32) >> 32) >> (32 - ELEMENTS);
  }

  __device__ __forceinline__ Pair sum(const Pack (&packs)[UNROLL], Pair& before, unsigned turn,
                                      int shift) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned own = heads_of(turn, shift);
    masks[turn % KEPT * THREADS + threadIdx.x] = own;
    float total = element_of(packs, 0);
#pragma unroll
    for (int e = 1; e < ELEMENTS; ++e) {
      const float value = element_of(packs, e);
      total = own >> e & 1u ? value : total + value;
    }
    // One vote instead of a head in every shuffle: a lane adds lanes from the last head on.
    const unsigned lanes = __ballot_sync(ALL, own != 0), earlier = lanes & ((1u << lane) - 1);
    const int distance = lane - (own ? lane : last_of(earlier));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float left = __shfl_up_sync(ALL, total, step);
      if (step <= distance) total += left;
    }
    const float left = __shfl_up_sync(ALL, total, 1), last = __shfl_sync(ALL, total, 31);
    before = {earlier ? 0 : NO_HEAD, lane ? left : 0.0f};
    return {lanes ? warp * 32 + last_of(lanes & (~lanes + 1)) : NO_HEAD, last};
  }

  __device__ __forceinline__ void keep(unsigned turn, const Pair& sum) const {
    first_heads[turn % KEPT] = sum.first_head;
  }

  __device__ __forceinline__ void outputs(Pack (&packs)[UNROLL], float before, float start,
                                         unsigned turn) const {
    const unsigned own = masks[turn % KEPT * THREADS + threadIdx.x];
    if ((int)threadIdx.x <= first_heads[turn % KEPT]) before = start + before;  // no head comes before it
    if (exclusive) outputs_after<true>(packs, own, before);
    else outputs_after<false>(packs, own, before);
  }
  template <bool EXCLUSIVE>
  static __device__ __forceinline__ void outputs_after(Pack (&packs)[UNROLL], unsigned own, float before) {
    const unsigned from_first = own | (~own + 1);  // bits of the elements from the first head on
    float sum = 0.0f;  // of the thread's elements since the last head
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      const float earlier = sum, value = element_of(packs, e);
      const bool is_head = own >> e & 1u;
      sum = e == 0 || is_head ? value : sum + value;
      const float in_thread = EXCLUSIVE ? earlier : sum;
      const float output = from_first >> e & 1u ? in_thread : before + in_thread;
      set_element(packs, e, EXCLUSIVE && is_head ? 0.0f : output);
    }
  }
};

// x, y, words and sizes: as in scan_tiles; bits: of mark_heads, the same for all rows. Dynamic shared memory:
// as in scan_tiles, then Scan::masks and Scan::heads.
extern "C" __global__ void __launch_bounds__(THREADS + 64, 2)
segmented_tiles(const WEFT_T* __restrict__ x, const unsigned* bits, WEFT_T* __restrict__ y, Word* words,
                index_t columns, index_t x_stride, index_t tiles, index_t row_words, index_t count,
                index_t exclusive) {
  extern __shared__ Pack slots[];
  __shared__ Tile tickets[TICKETS];
  __shared__ Pair totals[WARPS];
  __shared__ float prefixes[2];
  __shared__ int first_heads[KEPT];
  wait_for_previous_kernel();  // bits and words are its writes
  unsigned* masks = reinterpret_cast<unsigned*>(slots + SLOTS * UNROLL * THREADS) + KEPT * THREADS;
  unsigned* heads = masks + KEPT * THREADS;
  scan_tiles(Scan{bits, heads, masks, first_heads, exclusive != 0}, x, y, words, columns, x_stride, tiles,
             row_words, count, slots, tickets, totals, prefixes);
}
