// Stable sort of long rows: a radix sort by 8-bit digits from the lowest, with one pass over memory for each
// (Adinets and Merrill, "Onesweep", arXiv:2206.01784).
//
// count_digits counts the digits of all passes at once. sort_pass then moves every element once: a block
// takes a tile, finds the places of its elements within the tile (digits.cuh), and exchanges them in shared
// memory, so that elements of one digit lie together and are stored by neighbouring threads. A digit's
// elements of earlier tiles come first: a tile publishes how many it has, looks back at the tiles before it,
// and publishes how many there are up to its end (Merrill and Garland, "Single-pass parallel prefix scan with
// decoupled look-back", NVR-2016-002). Sums are of integers, so that the result does not depend on how far it
// looks.
//
// A number and its flag are one word, which begins as 0. Each pass has flags of its own, so that the words of
// the pass before count as not written, and are cleared once for all passes.
// Bytes: n keys read to count; in each pass n keys read and written, and with PAIRS n indices, which are 4
// bytes except for the last pass, which writes 8, and the first, which reads none. A tile has 1 KiB of words.
#include "published_word.cuh"
#include "digits.cuh"

#ifndef WIDE
#define WIDE 0  // 1: rows of 2^COUNT_BITS elements or more
#endif
#ifndef BLOCKS_AN_SM
#define BLOCKS_AN_SM 2  // of sort_pass, as a bound on its registers
#endif

#if WIDE
typedef unsigned long long Count;
#else
typedef unsigned Count;  // also a place in the row, and the word of a tile's digit
#endif
// Two flags for each pass, and 0.
constexpr int FLAG_BITS = PASSES < 8 ? 4 : 5, COUNT_BITS = 8 * (int)sizeof(Count) - FLAG_BITS;
constexpr Count COUNT_MASK = ((Count)1 << COUNT_BITS) - 1;
// Counters of a block and digit, which lanes share: 32 KiB for all passes.
constexpr int COLUMNS = 32 / PASSES;
constexpr int UNROLL = 8;  // loads of a thread before the first is used
constexpr int EXCHANGE_BYTES = PAIRS && sizeof(Count) > sizeof(Key) ? sizeof(Count) : sizeof(Key);

// x: (rows, columns), rows at x_stride elements; counts: (rows, PASSES, DIGITS), 0 before the launch. Block
// `b` counts part b % parts, of part_columns elements, of row b / parts.
extern "C" __global__ void __launch_bounds__(THREADS)
count_digits(const Key* __restrict__ x, Count* __restrict__ counts, index_t columns, index_t x_stride,
             index_t parts, index_t part_columns, index_t descending) {
  __shared__ unsigned table[PASSES * DIGITS * COLUMNS];
  const Key flip = descending ? (Key)~(Key)0 : (Key)0;
  const index_t row = blockIdx.x / (unsigned)parts, begin = blockIdx.x % (unsigned)parts * part_columns;
  const index_t end = begin + part_columns < columns ? begin + part_columns : columns;
  for (int i = threadIdx.x; i < PASSES * DIGITS * COLUMNS; i += THREADS) table[i] = 0;
  __syncthreads();
  const int column = threadIdx.x % COLUMNS;
  for (index_t start = begin; start < end; start += THREADS * UNROLL) {
    Key keys[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const index_t at = start + u * THREADS + threadIdx.x;
      keys[u] = at < end ? x[row * x_stride + at] : (Key)0;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (start + u * THREADS + threadIdx.x >= end) break;
      const Key key = ordered(keys[u], flip);
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const unsigned digit = (unsigned)(key >> pass * DIGIT_BITS) & LAST_DIGIT;
        atomicAdd(table + (pass * DIGITS + digit) * COLUMNS + column, 1u);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < PASSES * DIGITS; i += THREADS) {
    Count sum = 0;
    for (int c = 0; c < COLUMNS; ++c) sum += table[i * COLUMNS + c];
    if (sum) atomicAdd(counts + row * PASSES * DIGITS + i, sum);
  }
}

// Returns how many elements before the tile have the digit, or rather the place in the row of its first one.
// `word` is the digit's word of the tile before.
__device__ __forceinline__ Count look_back(const Count* word, Count partial, Count inclusive) {
  Count before = 0;
  for (;; word -= DIGITS) {
    Count value;
    do value = load_word(word);
    while (value >> COUNT_BITS != partial && value >> COUNT_BITS != inclusive);
    before += value & COUNT_MASK;
    if (value >> COUNT_BITS == inclusive) return before;
  }
}

// Shared memory of a block of sort_pass.
struct Shared {
  unsigned long long* exchange;  // elements, and after them indices, in the order of their digits
  unsigned* warp_counts;         // (WARPS, DIGITS)
  Count* offsets;                // place in the row of a digit's elements, less their place in the tile
  unsigned* sums;
  Count* wide_sums;
};

// Sorts a tile of `size` elements; FULL: of TILE, without a test beside each. x: the tile; y: the row;
// counts: the row's in this pass; own_words: the tile's. Other arguments are those of sort_pass, of the
// row.
template <bool FULL>
__device__ __forceinline__ void sort_tile(const Shared& shared, const Key* x, Key* y, const Count* from,
                                          Count* to, index_t* final_indices, const Count* counts,
                                          Count* own_words, bool is_first, Count begin, int size, int pass,
                                          Key flip) {
  const int thread = (int)threadIdx.x, warp = thread / 32, shift = pass * DIGIT_BITS;
  const int first = warp * 32 * ITEMS + thread % 32;
  Key keys[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) keys[i] = FULL || first + i * 32 < size ? x[first + i * 32] : (Key)0;
  unsigned* own_counts = shared.warp_counts + warp * DIGITS;
  unsigned digits[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    digits[i] = digit_of(keys[i], shift, flip);
    // Past the row's end, elements have the last digit and come after all others.
    if (!FULL && first + i * 32 >= size) digits[i] = LAST_DIGIT;
    atomicAdd(own_counts + digits[i], 1u);
  }
  __syncthreads();

  // The numbers are published before the places are known, for the tiles that wait for them.
  const Count partial = 2 * (Count)pass + 1, inclusive = partial + 1;
  unsigned totals[OWNED], starts[OWNED];
  Count before[OWNED];
  add_warps(shared.warp_counts, totals);
  if (is_first) {
    Count row_counts[OWNED] = {};
#pragma unroll
    for (int j = 0; j < OWNED; ++j)
      if (thread < OWNERS) row_counts[j] = counts[thread * OWNED + j];
    find_starts(row_counts, before, shared.wide_sums);
  }
  if (thread < OWNERS) {
#pragma unroll
    for (int j = 0; j < OWNED; ++j)
      store_word(own_words + j, is_first ? inclusive << COUNT_BITS | (before[j] + totals[j])
                                         : partial << COUNT_BITS | totals[j]);
  }
  find_starts(totals, starts, shared.sums);
  add_starts(shared.warp_counts, starts);
  __syncthreads();

  unsigned places[ITEMS];
  Key* moved_keys = reinterpret_cast<Key*>(shared.exchange);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    places[i] = take_place(own_counts, digits[i]);
    moved_keys[places[i]] = keys[i];
  }
  if (thread < OWNERS) {
#pragma unroll
    for (int j = 0; j < OWNED; ++j) {
      if (!is_first) {
        before[j] = look_back(own_words + j - DIGITS, partial, inclusive);
        store_word(own_words + j, inclusive << COUNT_BITS | (before[j] + totals[j]));
      }
      shared.offsets[thread * OWNED + j] = before[j] - starts[j];
    }
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int place = thread + i * THREADS;
    if (!FULL && place >= size) break;
    const Key key = moved_keys[place];
    digits[i] = digit_of(key, shift, flip);
    y[(Count)(shared.offsets[digits[i]] + place)] = key;
  }
  if (!PAIRS) return;
  // Loaded here and not with the keys: the registers of both do not fit.
  Count indices[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const Count at = begin + first + i * 32;
    indices[i] = at;
    if (pass > 0 && (FULL || first + i * 32 < size)) indices[i] = from[at];
  }
  __syncthreads();
  Count* moved_indices = reinterpret_cast<Count*>(shared.exchange);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) moved_indices[places[i]] = indices[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int place = thread + i * THREADS;
    if (!FULL && place >= size) break;
    const Count at = shared.offsets[digits[i]] + place;
    if (pass == PASSES - 1) final_indices[at] = (index_t)moved_indices[place];
    else to[at] = moved_indices[place];
  }
}

// x: as above; y: (rows, columns); counts: those of count_digits. With PAIRS, indices go from `from` to `to`,
// (rows, columns) each: the first pass reads none and the last stores to `final_indices` instead. words:
// (rows, tiles, DIGITS); tickets: a counter for each pass; both 0 before the first pass. `tiles` is the
// number of tiles of a row. Tiles are taken in order, so that those before a tile are finished or run.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
sort_pass(const Key* __restrict__ x, Key* __restrict__ y, const Count* __restrict__ from,
          Count* __restrict__ to, index_t* __restrict__ final_indices, const Count* __restrict__ counts,
          Count* words, Word* tickets, index_t columns, index_t x_stride, index_t tiles, index_t pass,
          index_t descending) {
  __shared__ unsigned long long exchange[(TILE * EXCHANGE_BYTES + 7) / 8];
  __shared__ unsigned warp_counts[WARPS * DIGITS];
  __shared__ Count offsets[DIGITS];
  __shared__ unsigned sums[WARPS];
  __shared__ Count wide_sums[WARPS];
  __shared__ unsigned ticket[1];
  if (threadIdx.x == 0) ticket[0] = (unsigned)atomicAdd(tickets + pass, 1ull);
  for (int i = threadIdx.x; i < WARPS * DIGITS; i += THREADS) warp_counts[i] = 0;
  __syncthreads();
  // In 32 bits: a division of 64 would be as much work as two elements.
  const index_t row = ticket[0] / (unsigned)tiles, tile = ticket[0] % (unsigned)tiles, begin = tile * TILE;
  const int size = columns - begin < TILE ? (int)(columns - begin) : TILE;
  const Shared shared = {exchange, warp_counts, offsets, sums, wide_sums};
  const Key flip = descending ? (Key)~(Key)0 : (Key)0;
  x = opaque(x + row * x_stride + begin), y = opaque(y + row * columns);
  counts += (row * PASSES + pass) * DIGITS;
  Count* own_words = words + (row * tiles + tile) * DIGITS + threadIdx.x * OWNED;
  if (PAIRS) {
    from = opaque(from + row * columns), to = opaque(to + row * columns);
    final_indices = opaque(final_indices + row * columns);
  }
  if (size == TILE)
    sort_tile<true>(shared, x, y, from, to, final_indices, counts, own_words, tile == 0, (Count)begin, size,
                    (int)pass, flip);
  else
    sort_tile<false>(shared, x, y, from, to, final_indices, counts, own_words, tile == 0, (Count)begin, size,
                     (int)pass, flip);
}
