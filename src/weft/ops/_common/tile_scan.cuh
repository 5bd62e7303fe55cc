// A scan of rows in one pass: blocks take tiles of rows and pass the sums of tiles to each other (Merrill and
// Garland, "Single-pass parallel prefix scan with decoupled look-back", NVR-2016-002).
//
// A thread has UNROLL vectors of VEC elements, which lie a warp's width of vectors apart, so that every
// access of a warp is contiguous. A kernel says by a type `Scan` what it adds:
//   Sum                           the sum of some elements; join(left, right) adds two, nothing() is 0
//   word(sum), sum_of(word)       a sum as a published word, which is not 0, and back
//   sum_of_lanes(sum)             the sum of a warp's lanes from 0 to 31, in each of them
//   sum_before(position)          the sum of the row before a tile, in each lane of a warp
//   fetch(slot, tile, shift)      starts the loads of what else a tile needs
//   value(sum)                    the number of a sum: what is kept for each vector until its outputs
//   sums(packs, before, ...)      the sum of a warp's elements; before[i]: that of those before vector i
//   keep(turn, sum)               called by one thread with a tile's sum, for outputs() DELAY turns later
//   outputs(pack, ...)            the outputs of a vector
#pragma once
#include "async_copy.cuh"
#include "numeric.cuh"
#include "published_word.cuh"
#include "reduce.cuh"
#include "wide_store.cuh"

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
#ifndef AHEAD
#define AHEAD 1  // tiles of a block whose loads are under way
#endif
#ifndef DELAY
#define DELAY 3  // turns between the publication of a tile's sum and the store of its outputs
#endif

constexpr int VEC = VEC_WIDTH;
constexpr int UNROLL = THREAD_BYTES / (VEC * (int)sizeof(WEFT_T));
constexpr int WARPS = THREADS / 32;
constexpr int TILE = THREADS * UNROLL * VEC;  // elements
constexpr int SLOTS = AHEAD + 1 + DELAY;  // tiles of a block in shared memory
constexpr int SCAN_BLOCKS = VEC > 1 && THREADS <= 256 ? 2 : 1;  // on an SM, which bounds the registers
constexpr unsigned ALL = 0xffffffffu;
constexpr unsigned READY = 1;
using Pack = Vector<WEFT_T, VEC>;

// Positions count in scan order from a part's first element, which REVERSE takes from the right: a row of n
// elements has its part from `start` on at part_of(row, start, n), and `size` elements of the part from
// `position` on at at(part, position, size).
template <typename T>
__device__ __forceinline__ T* part_of(T* row, index_t start, index_t n) {
  return row + (REVERSE ? n - start : start);
}
template <typename T>
__device__ __forceinline__ T* at(T* part, int position, int size) {
  return part + (REVERSE ? -size - position : position);
}

// Elements between a multiple of 16 bytes and a row's first element in scan order: the
// row's first part begins there, so that every vector of the row is aligned, and skips them.
__device__ __forceinline__ int shift_of(const WEFT_T* row, index_t n) {
  constexpr int BYTES = VEC * (int)sizeof(WEFT_T);
  const int past = (int)(reinterpret_cast<unsigned long long>(REVERSE ? row + n : row) % BYTES);
  return (REVERSE ? (BYTES - past) % BYTES : past) / (int)sizeof(WEFT_T);
}

// Loads vectors first, first + step, ... of a part; elements at positions below `skip`, or from `count` on,
// are 0 and are not read.
__device__ __forceinline__ void load_vecs(Pack (&packs)[UNROLL], const WEFT_T* part, int first, int step,
                                          int skip, int count) {
  // All loads of a whole part are issued before the first is used; a test beside each would prevent that.
  if (first * VEC >= skip && (first + (UNROLL - 1) * step + 1) * VEC <= count) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      packs[i] = *reinterpret_cast<const Pack*>(at(part, (first + i * step) * VEC, VEC));
    return;
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int position = (first + i * step) * VEC + j;
      const bool is_in = position >= skip && position < count;
      packs[i].at[REVERSE ? VEC - 1 - j : j] = is_in ? *at(part, position, 1) : from_float<WEFT_T>(0.0f);
    }
}

// As load_vecs, into shared memory: vector i of a thread at slot[i * THREADS]. Only this thread reads it,
// after copies_wait.
__device__ __forceinline__ void fetch_vecs(Pack* slot, const WEFT_T* part, int first, int step, int skip,
                                           int count) {
  constexpr bool HAS_COPIES = sizeof(Pack) == 16 || sizeof(Pack) == 4;
  if constexpr (HAS_COPIES) {
    if (first * VEC >= skip && (first + (UNROLL - 1) * step + 1) * VEC <= count) {
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        copy_async<sizeof(Pack)>(shared_address(slot + i * THREADS), at(part, (first + i * step) * VEC, VEC),
                                 sizeof(Pack));
      return;
    }
  }
  Pack packs[UNROLL];
  load_vecs(packs, part, first, step, skip, count);
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) slot[i * THREADS] = packs[i];
}

// Stores vectors first, first + step, ... of a part. `start`: the sum of the row before the part; before[i]:
// that of the part before vector i. skip, count: as in load_vecs.
template <typename Scan>
__device__ __forceinline__ void store_vecs(const Scan& scan, const Pack (&packs)[UNROLL],
                                           const float (&before)[UNROLL], float start, WEFT_T* part,
                                           int first, int step, int skip, int count, int turn = 0,
                                           int shift = 0) {
  if (first * VEC >= skip && (first + (UNROLL - 1) * step + 1) * VEC <= count) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      store_pack(at(part, (first + i * step) * VEC, VEC),
                 scan.outputs(packs[i], before[i], start, first + i * step, turn, shift));
    return;
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const Pack out = scan.outputs(packs[i], before[i], start, first + i * step, turn, shift);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int position = (first + i * step) * VEC + j;
      if (position >= skip && position < count) *at(part, position, 1) = out.at[REVERSE ? VEC - 1 - j : j];
    }
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
};

// Publishes the sums of groups and super-groups, by one warp that takes groups in order until none is left.
// The tiles' own threads do not do this: a block that waited for the other tiles of its group published its
// next tile late, for which the next group's last tile waited, and so on through all groups. That chain, not
// the memory, took 1.1 ms for 2^28 float32 elements on an H200 (results: primitives-2026-11-26.txt). `groups`
// are those of a row that have another one after them.
template <typename Scan>
__device__ __forceinline__ void publish_groups(Word* words, Word* counter, index_t tiles, index_t row_words,
                                               index_t groups, index_t rows) {
  const int lane = threadIdx.x % 32;
  for (;;) {
    index_t ticket = 0;
    if (lane == 0) ticket = (index_t)atomicAdd(counter, 1ull);
    ticket = __shfl_sync(ALL, (int)ticket, 0);  // a tensor has fewer than 2^43 elements, and 2^31 groups
    if (ticket >= groups * rows) return;
    const Position at_end(words + ticket / groups * row_words, tiles, ticket % groups * 32 + 31);
    using Sum = typename Scan::Sum;
    const Sum sum = Scan::sum_of_lanes(Scan::sum_of(wait_for_word(at_end.tile_words + lane)));
    if (lane == 0) store_word(at_end.group_words + at_end.in_super, Scan::word(sum));
    if (at_end.in_super < 31) continue;
    // The last group of a super-group: all its groups are summed, and the super-groups before it added.
    const Sum earlier = lane < 31 ? Scan::sum_of(wait_for_word(at_end.group_words + lane)) : sum;
    const Sum super_sum = Scan::sum_of_lanes(earlier);
    if (lane > 0) continue;
    const Word* before = at_end.super_words + at_end.super - 1;
    const Sum supers = at_end.super ? Scan::sum_of(wait_for_word(before)) : Scan::nothing();
    store_word(at_end.super_words + at_end.super, Scan::word(Scan::join(supers, super_sum)));
  }
}

struct Tile {
  index_t row, index;  // row -1: no tile is left

  __device__ __forceinline__ index_t start(int shift) const { return index * TILE - shift; }
  __device__ __forceinline__ int skip(int shift) const { return index ? 0 : shift; }
  // Elements up to the row's end; none in a last tile that only other rows need.
  __device__ __forceinline__ int count(index_t columns, int shift) const {
    return (int)max((index_t)0, min(columns - start(shift), (index_t)TILE));
  }
};

// Lets `threads` threads of the block meet, the others not. An emulator defines it itself.
#ifndef WEFT_NAMED_BARRIER
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}
#endif

// x: (rows, columns), rows at x_stride elements; y: (rows, columns) contiguous; words: two
// counters, and for each row the words of Position, `row_words` in number, all 0.
// `count` tiles are distributed, `tiles` of each row, by a counter: a block takes the next one when it has
// time. Tiles are taken in order by blocks that run, and a block deals with its own in order, so that whoever
// is waited for always goes on; the order of blockIdx would not guarantee that.
//
// A block has THREADS threads and two warps more, and tiles in SLOTS slots. In turn t the threads start the
// loads of tile t + AHEAD, add tile t up and publish its sum; meanwhile the first of the two warps waits for
// the sums before tile t - DELAY, whose outputs are stored at the end. So loads and sums of other blocks have
// whole turns to arrive. A tile's sum is published before its block waits for anything of that turn: where it
// came after, 2^28 float32 elements took 5.6 ms on an H200 (results: primitives-2026-11-26.txt). The second
// warp publishes sums of groups, apart from the turns.
//
// What limits the speed is the time from a tile's number until all sums before it have arrived, 7 us on an
// H200, in which the tile takes shared memory. So tiles wait as long as it has space, and the sums before
// vectors stay in registers. Forms in which the warp waits a turn ahead, or other warps store, were slower:
// blocks held each other up, or loads were late (results: primitives-2026-11-28b.txt).
//
// Dynamic shared memory: SLOTS tiles. The other arguments are in shared memory too: tickets[SLOTS],
// totals[WARPS], prefix[1].
template <typename Scan>
__device__ __forceinline__ void scan_tiles(const Scan& scan, const WEFT_T* __restrict__ x,
                                           WEFT_T* __restrict__ y, Word* words, index_t columns,
                                           index_t x_stride, index_t tiles, index_t row_words, index_t count,
                                           Pack* slots, Tile* tickets, typename Scan::Sum* totals,
                                           float* prefix) {
  constexpr int SUM_BARRIER = 1, TURN_BARRIER = 2;
  using Sum = typename Scan::Sum;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool waits = warp == WARPS;
  Word* row_sums = words + 2;
  if (warp > WARPS) {
    const index_t groups = (tiles - 1) / 32;
    if (groups) publish_groups<Scan>(row_sums, words + 1, tiles, row_words, groups, count / tiles);
    return;
  }
  const int first = warp * 32 * UNROLL + lane;
  Pack* own_slots = slots + threadIdx.x;
  float kept[DELAY + 1][UNROLL] = {};  // of tiles t, t - 1, ...: the sum of the tile before each vector
  index_t ahead = 0;
  if (threadIdx.x == 0) ahead = (index_t)atomicAdd(words, 1ull);
  for (int turn = -AHEAD;; ++turn) {
    const int coming_turn = turn + AHEAD;
    if (threadIdx.x == 0) {
      tickets[coming_turn % SLOTS] = ahead < count ? Tile{ahead / tiles, ahead % tiles} : Tile{-1, 0};
      // The answer takes as long as a load; it is needed in the next turn.
      ahead = (index_t)atomicAdd(words, 1ull);
    }
    named_barrier(TURN_BARRIER, THREADS + 32);
    if (!waits) {
      const Tile coming = tickets[coming_turn % SLOTS];
      if (coming.row >= 0) {
        const WEFT_T* row = x + coming.row * x_stride;
        const int shift = shift_of(row, columns);
        fetch_vecs(own_slots + coming_turn % SLOTS * (UNROLL * THREADS),
                   part_of(row, coming.start(shift), columns), first, 32, coming.skip(shift),
                   coming.count(columns, shift));
        scan.fetch(coming_turn % SLOTS, coming, shift);
      }
      copies_commit();  // a group a turn, also an empty one
    }
    if (turn < 0) continue;
#pragma unroll
    for (int turns = DELAY; turns > 0; --turns)
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) kept[turns][i] = kept[turns - 1][i];
    const Tile now = tickets[turn % SLOTS];
    const Tile last = turn < DELAY ? Tile{-1, 0} : tickets[(turn - DELAY) % SLOTS];
    if (waits) {
      if (last.row >= 0) {
        const float sum = Scan::sum_before(Position(row_sums + last.row * row_words, tiles, last.index));
        if (lane == 0) prefix[0] = sum;
      }
    } else if (now.row >= 0) {
      Pack packs[UNROLL];
      Sum before[UNROLL], warps_before = Scan::nothing(), sum = Scan::nothing();
      copies_wait<AHEAD>();
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) packs[i] = own_slots[(turn % SLOTS * UNROLL + i) * THREADS];
      const Sum own = scan.sums(packs, before, first, turn, shift_of(x + now.row * x_stride, columns));
      if (lane == 0) totals[warp] = own;
      named_barrier(SUM_BARRIER, THREADS);
#pragma unroll
      for (int k = 0; k < WARPS; ++k) {
        if (k == warp) warps_before = sum;
        sum = Scan::join(sum, totals[k]);
      }
      if (threadIdx.x == 0) {
        store_word(row_sums + now.row * row_words + now.index, Scan::word(sum));
        scan.keep(turn, sum);
      }
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) kept[0][i] = Scan::value(Scan::join(warps_before, before[i]));
    }
    named_barrier(TURN_BARRIER, THREADS + 32);
    if (last.row >= 0 && !waits) {
      const int done = turn - DELAY;
      Pack packs[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) packs[i] = own_slots[(done % SLOTS * UNROLL + i) * THREADS];
      WEFT_T* row = y + last.row * columns;
      const int shift = shift_of(row, columns);  // as in x: the host makes sure of that
      store_vecs(scan, packs, kept[DELAY], prefix[0], part_of(row, last.start(shift), columns), first, 32,
                 last.skip(shift), last.count(columns, shift), done, shift);
    }
    if (turn >= DELAY && last.row < 0) return;  // no tile is left, and none waits
  }
}
