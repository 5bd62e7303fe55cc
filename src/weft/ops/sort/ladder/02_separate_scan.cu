// Steps 2 and 3: a radix sort in three launches for each digit: count the digits of each tile, add up the
// counts of all tiles, and move the elements (D. Merrill and A. Grimshaw, "Revisiting sorting for GPGPU
// stream architectures", CS2010-03, University of Virginia, 2010).
//
// In step 2 a thread stores its elements where they belong; those of a warp lie apart. In step 3 (EXCHANGE)
// elements of one digit meet in shared memory first, so that neighbouring threads store neighbours.
// Bytes of each pass: n keys read twice and written once; 8 for each tile and digit, written and read twice.
#include "../digits.cuh"

#ifndef EXCHANGE
#define EXCHANGE 0
#endif

// x: (rows, columns), rows at x_stride elements; counts: (rows, DIGITS, tiles). A block has a tile.
extern "C" __global__ void __launch_bounds__(THREADS)
count_tiles(const Key* __restrict__ x, index_t* __restrict__ counts, index_t columns, index_t x_stride,
            index_t tiles, index_t shift, index_t descending) {
  __shared__ unsigned table[DIGITS];
  const Key flip = descending ? (Key)~(Key)0 : (Key)0;
  const index_t row = blockIdx.x / (unsigned)tiles, tile = blockIdx.x % (unsigned)tiles;
  for (int d = threadIdx.x; d < DIGITS; d += THREADS) table[d] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < TILE && tile * TILE + i < columns; i += THREADS)
    atomicAdd(table + digit_of(x[row * x_stride + tile * TILE + i], (int)shift, flip), 1u);
  __syncthreads();
  for (int d = threadIdx.x; d < DIGITS; d += THREADS) counts[(row * DIGITS + d) * tiles + tile] = table[d];
}

// Replaces the counts of a row by the sums of those before, which are places in the row: tile after tile of a
// digit, digit after digit. A block has a row.
extern "C" __global__ void __launch_bounds__(THREADS)
scan_counts(index_t* __restrict__ counts, index_t tiles) {
  __shared__ index_t sums[WARPS];
  __shared__ index_t carry[1];
  counts += blockIdx.x * DIGITS * tiles;
  index_t before = 0;
  for (index_t start = 0; start < DIGITS * tiles; start += THREADS) {
    const index_t at = start + threadIdx.x, count = at < DIGITS * tiles ? counts[at] : 0;
    const index_t place = before + sum_before(count, sums);
    if (at < DIGITS * tiles) counts[at] = place;
    if (threadIdx.x == THREADS - 1) carry[0] = place + count;
    __syncthreads();
    before = carry[0];
    __syncthreads();  // all have read the carry and the sums before they are written again
  }
}

// x, as above; y: (rows, columns); places: the counts after scan_counts. A block has a tile.
extern "C" __global__ void __launch_bounds__(THREADS)
move_tiles(const Key* __restrict__ x, Key* __restrict__ y, const index_t* __restrict__ places,
           index_t columns, index_t x_stride, index_t tiles, index_t shift, index_t descending) {
  __shared__ Key moved_keys[EXCHANGE ? TILE : 1];
  __shared__ unsigned counts[WARPS * DIGITS];
  __shared__ unsigned sums[WARPS];
  __shared__ index_t offsets[DIGITS];  // place in the row of a digit's elements, less their place in the tile
  const Key flip = descending ? (Key)~(Key)0 : (Key)0;
  const index_t row = blockIdx.x / (unsigned)tiles, tile = blockIdx.x % (unsigned)tiles;
  const int size = columns - tile * TILE < TILE ? (int)(columns - tile * TILE) : TILE;
  const int first = (int)threadIdx.x / 32 * 32 * ITEMS + (int)threadIdx.x % 32;
  unsigned* own_counts = counts + threadIdx.x / 32 * DIGITS;
  x += row * x_stride + tile * TILE, y += row * columns;
  for (int i = threadIdx.x; i < WARPS * DIGITS; i += THREADS) counts[i] = 0;
  __syncthreads();
  Key keys[ITEMS];
  unsigned digits[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    keys[i] = first + i * 32 < size ? x[first + i * 32] : (Key)0;
    digits[i] = first + i * 32 < size ? digit_of(keys[i], (int)shift, flip) : LAST_DIGIT;
    atomicAdd(own_counts + digits[i], 1u);
  }
  __syncthreads();
  unsigned totals[OWNED], starts[OWNED];
  add_warps(counts, totals);
  find_starts(totals, starts, sums);
  add_starts(counts, starts);
  if (threadIdx.x < OWNERS) {
#pragma unroll
    for (int j = 0; j < OWNED; ++j) {
      const index_t digit = threadIdx.x * OWNED + j;
      offsets[digit] = places[(row * DIGITS + digit) * tiles + tile] - starts[j];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const unsigned place = take_place(own_counts, digits[i]);
    if (EXCHANGE) moved_keys[place] = keys[i];
    else if ((int)place < size) y[offsets[digits[i]] + place] = keys[i];
  }
  if (!EXCHANGE) return;
  __syncthreads();
  for (int place = threadIdx.x; place < size; place += THREADS)
    y[offsets[digit_of(moved_keys[place], (int)shift, flip)] + place] = moved_keys[place];
}
