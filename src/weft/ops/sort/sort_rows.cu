// Stable sort of short rows: a block has a row in registers and sorts it by 8-bit digits from the lowest.
//
// Each pass finds the places of the elements (digits.cuh), and exchanges them through shared memory. A row
// has at most TILE elements. What lies past its end has the last digit in every pass, and stays behind.
// Bytes: the row read once, written once; 8 for each index.
#include "digits.cuh"

// x: (gridDim.x, columns), rows at x_stride elements; values, and with PAIRS indices: (gridDim.x, columns).
extern "C" __global__ void __launch_bounds__(THREADS)
sort_rows(const Key* __restrict__ x, Key* __restrict__ values, index_t* __restrict__ indices,
          index_t columns, index_t x_stride, index_t descending) {
  __shared__ Key moved_keys[TILE];
  __shared__ unsigned short moved_indices[PAIRS ? TILE : 1];
  __shared__ unsigned counts[WARPS * DIGITS];
  __shared__ unsigned sums[WARPS];
  const Key* row = x + blockIdx.x * x_stride;
  const Key flip = descending ? (Key)~(Key)0 : (Key)0;
  const int thread = (int)threadIdx.x, warp = thread / 32, size = (int)columns;
  const int first = warp * 32 * ITEMS + thread % 32;
  Key keys[ITEMS];
  unsigned short indices_of[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    keys[i] = first + i * 32 < size ? row[first + i * 32] : (Key)0;
    indices_of[i] = (unsigned short)(first + i * 32);
  }
  for (int shift = 0;; shift += DIGIT_BITS) {
    for (int i = thread; i < WARPS * DIGITS; i += THREADS) counts[i] = 0;
    __syncthreads();
    unsigned digits[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      digits[i] = digit_of(keys[i], shift, flip);
      if (first + i * 32 >= size) digits[i] = LAST_DIGIT;
      atomicAdd(counts + warp * DIGITS + digits[i], 1u);
    }
    __syncthreads();
    unsigned totals[OWNED], starts[OWNED];
    add_warps(counts, totals);
    find_starts(totals, starts, sums);
    add_starts(counts, starts);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const unsigned place = take_place(counts + warp * DIGITS, digits[i]);
      moved_keys[place] = keys[i];
      if (PAIRS) moved_indices[place] = indices_of[i];
    }
    __syncthreads();
    if (shift + DIGIT_BITS == KEY_BITS) break;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      keys[i] = moved_keys[first + i * 32];
      if (PAIRS) indices_of[i] = moved_indices[first + i * 32];
    }
    // The counters are cleared next, which nobody reads any more; the barrier after that also keeps the
    // exchange from being overwritten before all have read it.
  }
  for (int i = thread; i < size; i += THREADS) {
    values[blockIdx.x * columns + i] = moved_keys[i];
    if (PAIRS) indices[blockIdx.x * columns + i] = moved_indices[i];
  }
}
