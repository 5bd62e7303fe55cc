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
#include "async_copy.cuh"
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

// Returns the sums of a vector's elements from its first one, in scan order, to each.
__device__ __forceinline__ void sums_in_vec(const Pack& pack, float (&sums)[VEC]) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const float value = element(pack, REVERSE ? VEC - 1 - j : j);
    sums[j] = j ? sums[j - 1] + value : value;
  }
}

// Stores a vector as one access. By an assignment NVRTC 13.0 stores its elements one by one here: a warp's
// accesses are then VEC strided ones, and 2^28 bfloat16 elements took 1.0 ms on an H200. An emulator assigns.
__device__ __forceinline__ void store_pack(WEFT_T* to, const Pack& pack) {
#ifndef WEFT_NAMED_BARRIER
  if constexpr (sizeof(Pack) == 16) {
    uint4 words;
    memcpy(&words, &pack, sizeof(words));
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
    return;
  }
#endif
  *reinterpret_cast<Pack*>(to) = pack;
}

// Returns the outputs of a vector, whose elements are added up again: they take less registers than their
// sums. `before` is the sum of everything before the vector.
__device__ __forceinline__ Pack outputs(const Pack& pack, float before, bool exclusive) {
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

// start + before[i]: the sum of everything before vector i. skip, count: as in load_vecs.
__device__ __forceinline__ void store_vecs(const Pack (&packs)[UNROLL], const float (&before)[UNROLL],
                                           float start, bool exclusive, WEFT_T* part, int first, int step,
                                           int skip, int count) {
  if (first * VEC >= skip && (first + (UNROLL - 1) * step + 1) * VEC <= count) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      store_pack(at(part, (first + i * step) * VEC, VEC), outputs(packs[i], start + before[i], exclusive));
    return;
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const Pack out = outputs(packs[i], start + before[i], exclusive);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int position = (first + i * step) * VEC + j;
      if (position >= skip && position < count) *at(part, position, 1) = out.at[REVERSE ? VEC - 1 - j : j];
    }
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
    store_vecs(packs, before, carry, exclusive, out, lane, group, skip, count);
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

  // Returns the sum of the row before the tile, in every lane of the calling warp. The words are asked for
  // together: an answer of L2 takes as long as a tile's arithmetic.
  __device__ __forceinline__ float sum_before() const {
    const int lane = threadIdx.x % 32;
    const bool tile = lane < in_group, group = lane < in_super;
    Word tile_word = 0, group_word = 0, super_word = 0;
    bool missing;
    do {
      if (tile) tile_word = load_word(tile_words + lane);
      if (group) group_word = load_word(group_words + lane);
      if (super) super_word = load_word(super_words + super - 1);
      missing = (tile && !tile_word) || (group && !group_word) || (super && !super_word);
    } while (missing);
    __syncwarp();
    const float tiles = warp_sum(sum_of(tile_word)), groups = warp_sum(sum_of(group_word));
    return sum_of(super_word) + (groups + tiles);
  }
};

// Publishes the sums of groups and super-groups, by one warp that takes groups in order until none is left.
// The tiles' own threads do not do this: a block that waited for the other tiles of its group published its
// next tile late, for which the next group's last tile waited, and so on through all groups. That chain, not
// the memory, took 1.1 ms for 2^28 float32 elements on an H200 (results: primitives-2026-11-26.txt). `groups`
// are those of a row that have another one after them.
__device__ __forceinline__ void publish_groups(Word* words, Word* counter, index_t tiles, index_t row_words,
                                               index_t groups, index_t rows) {
  const int lane = threadIdx.x % 32;
  for (;;) {
    index_t ticket = 0;
    if (lane == 0) ticket = (index_t)atomicAdd(counter, 1ull);
    ticket = __shfl_sync(ALL, (int)ticket, 0);  // a tensor has fewer than 2^43 elements, and 2^31 groups
    if (ticket >= groups * rows) return;
    const Position at_end(words + ticket / groups * row_words, tiles, ticket % groups * 32 + 31);
    const float sum = warp_sum(sum_of(wait_for_word(at_end.tile_words + lane)));
    if (lane == 0) publish(at_end.group_words + at_end.in_super, READY, sum);
    if (at_end.in_super < 31) continue;
    // The last group of a super-group: all its groups are summed, and the super-groups before it added.
    const float earlier = lane < 31 ? sum_of(wait_for_word(at_end.group_words + lane)) : sum;
    const float super_sum = warp_sum(earlier);
    if (lane > 0) continue;
    const Word* before = at_end.super_words + at_end.super - 1;
    const float supers = at_end.super ? sum_of(wait_for_word(before)) : 0.0f;
    publish(at_end.super_words + at_end.super, READY, supers + super_sum);
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

// x, y as above; words: two counters, and for each row the words of Position, `row_words` in number, all 0.
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
// Dynamic shared memory: SLOTS tiles, and the sums before each vector of DELAY + 1 tiles.
extern "C" __global__ void __launch_bounds__(THREADS + 64)
cumsum_tiles(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, Word* words, index_t columns,
             index_t x_stride, index_t tiles, index_t row_words, index_t count, index_t exclusive) {
  constexpr int SUM_BARRIER = 1, TURN_BARRIER = 2;
  extern __shared__ Pack slots[];
  __shared__ Tile tickets[SLOTS];
  __shared__ float totals[WARPS];
  __shared__ float prefix[1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool waits = warp == WARPS;
  Word* row_sums = words + 2;
  if (warp > WARPS) {
    const index_t groups = (tiles - 1) / 32;
    if (groups) publish_groups(row_sums, words + 1, tiles, row_words, groups, count / tiles);
    return;
  }
  const int first = warp * 32 * UNROLL + lane;
  Pack* own_slots = slots + threadIdx.x;
  float* own_before = reinterpret_cast<float*>(slots + SLOTS * UNROLL * THREADS) + threadIdx.x;
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
      }
      copies_commit();  // a group a turn, also an empty one
    }
    if (turn < 0) continue;
    const Tile now = tickets[turn % SLOTS];
    const Tile last = turn < DELAY ? Tile{-1, 0} : tickets[(turn - DELAY) % SLOTS];
    if (waits) {
      if (last.row >= 0) {
        const float sum = Position(row_sums + last.row * row_words, tiles, last.index).sum_before();
        if (lane == 0) prefix[0] = sum;
      }
    } else if (now.row >= 0) {
      Pack packs[UNROLL];
      float before[UNROLL], warps_before = 0.0f, sum = 0.0f;
      copies_wait<AHEAD>();
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) packs[i] = own_slots[(turn % SLOTS * UNROLL + i) * THREADS];
      const float own = scan_vecs(packs, before, 32);
      if (lane == 0) totals[warp] = own;
      named_barrier(SUM_BARRIER, THREADS);
#pragma unroll
      for (int k = 0; k < WARPS; ++k) {
        if (k == warp) warps_before = sum;
        sum += totals[k];
      }
      if (threadIdx.x == 0) publish(row_sums + now.row * row_words + now.index, READY, sum);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        own_before[(turn % (DELAY + 1) * UNROLL + i) * THREADS] = warps_before + before[i];
    }
    named_barrier(TURN_BARRIER, THREADS + 32);
    if (last.row >= 0 && !waits) {
      const int done = turn - DELAY;
      Pack packs[UNROLL];
      float before[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        packs[i] = own_slots[(done % SLOTS * UNROLL + i) * THREADS];
        before[i] = own_before[(done % (DELAY + 1) * UNROLL + i) * THREADS];
      }
      WEFT_T* row = y + last.row * columns;
      const int shift = shift_of(row, columns);  // as in x: the host makes sure of that
      store_vecs(packs, before, prefix[0], exclusive, part_of(row, last.start(shift), columns), first, 32,
                 last.skip(shift), last.count(columns, shift));
    }
    if (turn >= DELAY && last.row < 0) return;  // no tile is left, and none waits
  }
}
