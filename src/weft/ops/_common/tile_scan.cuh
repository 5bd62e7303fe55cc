// A scan of rows in one pass: blocks take tiles of rows and pass the sums of tiles to each other (Merrill and
// Garland, "Single-pass parallel prefix scan with decoupled look-back", NVR-2016-002).
//
// A thread has UNROLL vectors of VEC elements. In memory they lie a warp's width of vectors apart, so that
// every access of a warp is contiguous; a tile is loaded and stored so. For the sums a thread has UNROLL
// neighbouring vectors, which it exchanges with its warp in shared memory: the elements of a thread are added
// one after another, and one scan of lanes is left for a warp's tile. A kernel says by a type `Scan` what it
// adds:
//   Sum                           the sum of some elements; join(left, right) adds two, nothing() is 0
//   word(sum), sum_of(word)       a sum as a published word, which is not 0, and back
//   sum_of_lanes(sum)             the sum of a warp's lanes from 0 to 31, in each of them
//   sum_before(position)          the sum of the row before a tile, in each lane of a warp
//   fetch(turn, tile)             starts the loads of what else the tile of a turn needs
//   value(sum)                    the number of a sum: what is kept for each thread until its outputs
//   sum(packs, before, ...)       the sum of a warp's elements; before: of those before the thread's
//   keep(turn, sum)               called by one thread with a tile's sum, for outputs() DELAY turns later
//   outputs(packs, ...)           replaces a thread's elements by their outputs
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
#define DELAY 4  // turns between the publication of a tile's sum and the store of its outputs
#endif

constexpr int VEC = VEC_WIDTH;
constexpr int UNROLL = THREAD_BYTES / (VEC * (int)sizeof(WEFT_T));
constexpr int ELEMENTS = UNROLL * VEC;  // of a thread
constexpr int WARPS = THREADS / 32;
constexpr int TILE = THREADS * ELEMENTS;
constexpr unsigned SLOTS = AHEAD + 1 + DELAY;  // tiles of a block in shared memory
constexpr unsigned KEPT = DELAY + 1;           // tiles of a block whose sums are kept
constexpr unsigned TICKETS = 8;                // of a block at once: one more than slots, a power of two
constexpr unsigned ALL = 0xffffffffu;
constexpr unsigned READY = 1;
using Pack = Vector<WEFT_T, VEC>;
static_assert(SLOTS < TICKETS, "a ticket is written while SLOTS others are read");

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

// Places of a warp's vectors in shared memory. The i-th of a lane's vectors is number i * 32 + lane when it
// is loaded or stored (`across`), and lane * UNROLL + i in the sums (`along`). The lower bits of a number are
// exchanged by the row of 128 bytes that it is in, so that neither meets the same banks twice.
constexpr int ROW = 128 / (int)sizeof(Pack);
static_assert((UNROLL & (UNROLL - 1)) == 0 && UNROLL <= ROW, "an exchange within UNROLL vectors");
__device__ __forceinline__ int place_across(int i) {
  const int lane = threadIdx.x % 32;
  if constexpr (32 % (ROW * UNROLL) == 0) return i * 32 + (lane ^ (lane / ROW & (UNROLL - 1)));
  return (i * 32 + lane) ^ ((i * 32 + lane) / ROW & (UNROLL - 1));
}
__device__ __forceinline__ int place_along(int i) {
  const int first = threadIdx.x % 32 * UNROLL;
  return first + (i ^ (first / ROW & (UNROLL - 1)));
}

// As load_vecs, into shared memory: `slot` is that of the warp's vectors, of which this thread writes every
// 32nd. They are there after copies_wait and a __syncwarp.
__device__ __forceinline__ void fetch_vecs(Pack* slot, const WEFT_T* part, int first, int skip, int count) {
  constexpr bool HAS_COPIES = sizeof(Pack) == 16 || sizeof(Pack) == 4;
  if constexpr (HAS_COPIES) {
    if (first * VEC >= skip && (first + (UNROLL - 1) * 32 + 1) * VEC <= count) {
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        copy_async<sizeof(Pack)>(shared_address(slot + place_across(i)),
                                 at(part, (first + i * 32) * VEC, VEC), sizeof(Pack));
      return;
    }
  }
  Pack packs[UNROLL];
  load_vecs(packs, part, first, 32, skip, count);
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) slot[place_across(i)] = packs[i];
}

// Stores vectors first, first + step, ... of a part. skip, count: as in load_vecs.
__device__ __forceinline__ void store_vecs(const Pack (&packs)[UNROLL], WEFT_T* part, int first, int step,
                                           int skip, int count) {
  if (first * VEC >= skip && (first + (UNROLL - 1) * step + 1) * VEC <= count) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) store_pack(at(part, (first + i * step) * VEC, VEC), packs[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int position = (first + i * step) * VEC + j;
      if (position >= skip && position < count)
        *at(part, position, 1) = packs[i].at[REVERSE ? VEC - 1 - j : j];
    }
}

// Element `e` of a thread's neighbouring vectors, in scan order.
__device__ __forceinline__ float element_of(const Pack (&packs)[UNROLL], int e) {
  return element(packs[e / VEC], REVERSE ? VEC - 1 - e % VEC : e % VEC);
}
__device__ __forceinline__ void set_element(Pack (&packs)[UNROLL], int e, float value) {
  packs[e / VEC].at[REVERSE ? VEC - 1 - e % VEC : e % VEC] = from_float<WEFT_T>(value);
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
      : in_group((int)tile & 31), in_super((int)(tile >> 5) & 31), super(tile >> 10) {
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

// A tile as its block's threads need it. Positions are those of load_vecs.
struct alignas(16) Tile {
  const WEFT_T* x;  // its part of the row; null: no tile is left
  WEFT_T* y;
  Word* row_words;
  int index, skip, count, shift;
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
// loads of tile t + AHEAD, add tile t up and publish its sum; meanwhile the first of the two warps takes the
// ticket of the next turn and waits for the sums before tile t - DELAY, whose outputs are stored at the end.
// So loads and sums of other blocks have whole turns to arrive. A tile's sum is published before its block
// waits for anything of that turn: where it came after, 2^28 float32 elements took 5.6 ms on an H200
// (results: primitives-2026-11-26.txt). The second warp publishes sums of groups, apart from the turns.
//
// Dynamic shared memory: SLOTS tiles, and the sum before each thread of KEPT tiles. The other arguments are
// in shared memory too: tickets[TICKETS], totals[WARPS], prefixes[2].
template <typename Scan>
__device__ __forceinline__ void scan_tiles(const Scan& scan, const WEFT_T* __restrict__ x,
                                           WEFT_T* __restrict__ y, Word* words, index_t columns,
                                           index_t x_stride, index_t tiles, index_t row_words, index_t count,
                                           Pack* slots, Tile* tickets, typename Scan::Sum* totals,
                                           float* prefixes) {
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
  // A tile has at least 256 elements, so that 32 bits count all tiles that fit into any memory.
  unsigned ticket = 0;
  const auto take_ticket = [&](unsigned turn) {
    Tile tile = {};
    if (ticket < (unsigned)count) {
      const unsigned row = ticket / (unsigned)tiles;
      const WEFT_T* x_row = x + row * x_stride;
      tile.index = (int)(ticket - row * (unsigned)tiles);
      tile.shift = shift_of(x_row, columns);  // as in y: the host makes sure of that
      const index_t start = (index_t)tile.index * TILE - tile.shift;
      tile.x = part_of(x_row, start, columns);
      tile.y = part_of(y + row * columns, start, columns);
      tile.row_words = row_sums + row * row_words;
      tile.skip = tile.index ? 0 : tile.shift;
      // None in a last tile that only other rows need.
      tile.count = (int)max((index_t)0, min(columns - start, (index_t)TILE));
    }
    tickets[turn % TICKETS] = tile;
    // The answer takes as long as a load; it is needed in the next turn.
    ticket = (unsigned)atomicAdd(words, 1ull);
  };
  const int first = warp * 32 * UNROLL + lane;
  Pack* own_slots = slots + warp * 32 * UNROLL;
  float* own_before = reinterpret_cast<float*>(slots + SLOTS * UNROLL * THREADS) + threadIdx.x;
  if (waits && lane == 0) {
    ticket = (unsigned)atomicAdd(words, 1ull);
    take_ticket(0);
  }
  named_barrier(TURN_BARRIER, THREADS + 32);
  for (unsigned coming_turn = 0;; ++coming_turn) {
    const unsigned turn = coming_turn - AHEAD, done_turn = turn - DELAY;
    const bool is_done = coming_turn >= AHEAD + DELAY;
    if (waits) {
      if (lane == 0) take_ticket(coming_turn + 1);
      if (is_done && tickets[done_turn % TICKETS].x) {
        const Tile& done = tickets[done_turn % TICKETS];
        const float sum = Scan::sum_before(Position(done.row_words, tiles, done.index));
        // Threads may still read the one of the turn before.
        if (lane == 0) prefixes[turn % 2] = sum;
      }
    } else {
      const Tile coming = tickets[coming_turn % TICKETS];
      if (coming.x) {
        fetch_vecs(own_slots + coming_turn % SLOTS * (UNROLL * THREADS), coming.x, first, coming.skip,
                   coming.count);
        scan.fetch(coming_turn, coming);
      }
      copies_commit();  // a group a turn, also an empty one
      if (coming_turn >= AHEAD && tickets[turn % TICKETS].x) {
        const Tile& now = tickets[turn % TICKETS];
        const Pack* slot = own_slots + turn % SLOTS * (UNROLL * THREADS);
        Pack packs[UNROLL];
        Sum before, warps_before = Scan::nothing(), sum = Scan::nothing();
        copies_wait<AHEAD>();
        __syncwarp();  // the other lanes' copies have arrived
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) packs[i] = slot[place_along(i)];
        const Sum own = scan.sum(packs, before, turn, now.shift);
        if (lane == 0) totals[warp] = own;
        named_barrier(SUM_BARRIER, THREADS);
#pragma unroll
        for (int k = 0; k < WARPS; ++k) {
          if (k == warp) warps_before = sum;
          sum = Scan::join(sum, totals[k]);
        }
        if (threadIdx.x == 0) {
          store_word(now.row_words + now.index, Scan::word(sum));
          scan.keep(turn, sum);
        }
        own_before[turn % KEPT * THREADS] = Scan::value(Scan::join(warps_before, before));
      }
    }
    named_barrier(TURN_BARRIER, THREADS + 32);
    if (!is_done) continue;
    const Tile done = tickets[done_turn % TICKETS];
    if (!done.x) return;  // no tile is left, and none waits
    if (waits) continue;
    Pack* slot = own_slots + done_turn % SLOTS * (UNROLL * THREADS);
    Pack packs[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) packs[i] = slot[place_along(i)];
    scan.outputs(packs, own_before[done_turn % KEPT * THREADS], prefixes[turn % 2], done_turn);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) slot[place_along(i)] = packs[i];
    __syncwarp();  // the other lanes' outputs are there
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) packs[i] = slot[place_across(i)];
    store_vecs(packs, done.y, first, 32, done.skip, done.count);
  }
}
