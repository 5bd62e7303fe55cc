// The k largest elements of each row by radix select: a block for each row.
//
// Elements become unsigned keys in their order. Four passes over the row fix the k-th largest key, 8 bits
// at a time: each counts the next digit among the keys that agree with the digits fixed so far. A last pass
// collects the keys above it, and as many equal ones as are due, lowest index first. The k elements are
// sorted by rank.
// Bytes: the row read five times (from L2 after the first where it fits), 8 + sizeof(WEFT_T) written for
// each of the k.
#include "numeric.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef MAX_K
#define MAX_K 1024
#endif

constexpr int DIGITS = 256, WARPS = THREADS / 32;

// Returns the key of an element: larger is earlier in the output. NaN is the largest, -0 equals 0.
__device__ __forceinline__ unsigned key_of(WEFT_T element, bool largest) {
  const float v = to_float(element);
  unsigned bits = 0u;
  if (v != 0.0f) memcpy(&bits, &v, sizeof(bits));
  unsigned key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (v != v) key = 0xffffffffu;
  return largest ? key : ~key;
}

// x: (gridDim.x, columns), rows at x_stride elements; values, indices: (gridDim.x, k) contiguous.
// 1 <= k <= MAX_K.
extern "C" __global__ void __launch_bounds__(THREADS)
topk_rows(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ values, index_t* __restrict__ indices,
          index_t columns, index_t x_stride, index_t k, index_t largest) {
  __shared__ unsigned long long counts[DIGITS];  // a row may have more than 2^32 elements
  __shared__ unsigned long long state[3];        // the digit, how many are due of it, how many there are
  __shared__ unsigned slots[1];
  __shared__ unsigned warp_counts[WARPS];
  __shared__ unsigned keys[MAX_K];
  __shared__ index_t places[MAX_K];
  const WEFT_T* row = x + blockIdx.x * x_stride;
  const int thread = (int)threadIdx.x;
  unsigned threshold = 0, mask = 0;
  unsigned long long due = (unsigned long long)k, equal = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int d = thread; d < DIGITS; d += THREADS) counts[d] = 0;
    __syncthreads();
    for (index_t i = thread; i < columns; i += THREADS) {
      const unsigned key = key_of(row[i], largest);
      if ((key & mask) == threshold) atomicAdd(counts + (key >> shift & 255), 1ull);
    }
    __syncthreads();
    for (int d = thread; d < DIGITS; d += THREADS) {
      unsigned long long above = 0;
      for (int e = DIGITS - 1; e > d; --e) above += counts[e];
      if (above < due && due <= above + counts[d]) state[0] = d, state[1] = due - above, state[2] = counts[d];
    }
    __syncthreads();
    threshold |= (unsigned)state[0] << shift;
    mask |= 255u << shift;
    due = state[1], equal = state[2];
    if (thread == 0) slots[0] = 0;
    __syncthreads();  // all have read the digit before the next pass writes it
  }
  // Without a tie at the border every equal key is due, in any order: the sort below restores it.
  const bool takes_all = due == equal;
  for (index_t i = thread; i < columns; i += THREADS) {
    const unsigned key = key_of(row[i], largest);
    if (key > threshold || (takes_all && key == threshold)) {
      const unsigned slot = atomicAdd(slots, 1u);
      keys[slot] = key, places[slot] = i;
    }
  }
  __syncthreads();
  // With a tie, the equal keys of each THREADS neighbouring elements are numbered in order of their index.
  unsigned taken = slots[0];
  for (index_t start = 0; !takes_all && taken < k && start < columns; start += THREADS) {
    const bool hit = start + thread < columns && key_of(row[start + thread], largest) == threshold;
    const unsigned votes = __ballot_sync(0xffffffffu, hit);
    if (thread % 32 == 0) warp_counts[thread / 32] = __popc(votes);
    __syncthreads();
    unsigned slot = taken + __popc(votes & ((1u << thread % 32) - 1));
    for (int w = 0; w < WARPS; ++w) {
      if (w < thread / 32) slot += warp_counts[w];
      taken += warp_counts[w];
    }
    if (hit && slot < k) keys[slot] = threshold, places[slot] = start + thread;
    __syncthreads();  // the counts have been read before the next elements overwrite them
  }
  // An element's position is the number of elements before it: larger keys, and equal ones of lower index.
  for (int i = thread; i < k; i += THREADS) {
    int rank = 0;
    for (int j = 0; j < k; ++j) rank += keys[j] > keys[i] || (keys[j] == keys[i] && places[j] < places[i]);
    values[blockIdx.x * k + rank] = row[places[i]];
    indices[blockIdx.x * k + rank] = places[i];
  }
}
