// The k largest elements of each row, in two ways. Elements become unsigned keys in their order.
//
// topk_lists, for k up to 32: each warp keeps the 32 best elements that it has seen, one in each lane, and
// compares what it reads with the k-th of them. Few elements are better, so that the row is read once at the
// speed of memory. A row is cut into parts for several blocks; topk_merge joins their lists. The method is
// that of Johnson, Douze and Jegou, "Billion-scale similarity search with GPUs" (arXiv:1702.08734).
// Bytes: the row read once, 8 + sizeof(WEFT_T) written for each of the k, and 8 for each of a part's k.
//
// topk_rows, for larger k: radix select, a block for each row. Passes over the row fix the k-th largest key,
// 8 bits at a time: each counts the next digit among the keys that agree with the digits fixed so far.
// Float32 has four digits, float16 three and bfloat16 two; what is below them follows from them. Counters
// have COPIES, one for each lane of a warp in long rows: the first digits of most elements are few, and one
// counter would take one element a clock. A last pass collects the keys above the k-th, and those that equal
// it. If more equal ones are there than due, those of lowest index are taken. The k elements are sorted by
// rank.
// Bytes: the row read three to five times (from L2 after the first where it fits), 8 + sizeof(WEFT_T)
// written for each of the k.
#include "numeric.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef MAX_K
#define MAX_K 1024
#endif

#ifndef VEC_WIDTH
#define VEC_WIDTH 1  // elements of a load
#endif
#ifndef COPIES
#define COPIES 4  // of the counters of topk_rows
#endif
#ifndef WARPS_A_ROW
#define WARPS_A_ROW (THREADS / 32)  // of topk_lists: all of a block, or 1
#endif

constexpr int DIGITS = 256, WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr int LAST_SHIFT = sizeof(WEFT_T) == 4 ? 0 : UPPER<WEFT_T> ? 16 : 8;  // of the last digit of a key
constexpr unsigned NOWHERE = 0xffffffffu;  // the place of no element; those of elements are lower

// Returns the key of an element: larger is earlier in the output. NaN is the largest, -0 equals 0.
__device__ __forceinline__ unsigned key_of(WEFT_T element, bool largest) {
  const float v = to_float(element);
  unsigned bits = 0u;
  if (v != 0.0f) memcpy(&bits, &v, sizeof(bits));
  unsigned key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (v != v) key = 0xffffffffu;
  return largest ? key : ~key;
}

// Calls `body` with the key and the index of each element of a row, as this thread comes to them. Several
// loads are in flight.
template <typename Body>
__device__ __forceinline__ void for_each_key(const WEFT_T* row, index_t columns, bool largest, Body body) {
  constexpr int VEC = VEC_WIDTH, UNROLL = 4;
  for (index_t start = (index_t)threadIdx.x * VEC; start < columns; start += THREADS * VEC * UNROLL) {
    Vector<WEFT_T, VEC> v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const index_t at = start + u * THREADS * VEC;
      if (at < columns) v[u] = *reinterpret_cast<const Vector<WEFT_T, VEC>*>(row + at);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const index_t at = start + u * THREADS * VEC;
      if (at >= columns) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) body(key_of(v[u].at[j], largest), at + j);
    }
  }
}

// The digit of the k-th largest key, how many are due of it, and how many there are.
struct Digit { unsigned long long digit, due, equal; };

// Writes the digit to `found`, by one warp. `totals`: elements of each digit. A lane has eight of them, the
// first lane the largest ones.
__device__ __forceinline__ void find_digit(Digit& found, const unsigned long long* totals,
                                           unsigned long long due) {
  constexpr int EACH = DIGITS / 32;
  const int lane = (int)threadIdx.x, first = DIGITS - 1 - lane * EACH;
  unsigned long long own = 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) own += totals[first - e];
  unsigned long long up_to = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned long long before = __shfl_up_sync(ALL, up_to, step);
    if (lane >= step) up_to += before;
  }
  unsigned long long above = up_to - own;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const unsigned long long total = totals[first - e];
    if (above < due && due <= above + total)
      found = {(unsigned long long)(first - e), due - above, total};
    above += total;
  }
}

// x: (gridDim.x, columns), rows at x_stride elements; values, indices: (gridDim.x, k) contiguous.
// 1 <= k <= MAX_K. Without the hint of blocks an SM the compiler spills on sm_100.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 512 ? 1 : 3)
topk_rows(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ values, index_t* __restrict__ indices,
          index_t columns, index_t x_stride, index_t k, index_t largest) {
  constexpr unsigned TIES = DIGITS * COPIES / 2;
  __shared__ unsigned long long memory[DIGITS * COPIES / 2];  // counters, and then places of equal keys
  __shared__ unsigned long long totals[DIGITS];  // a row may have more than 2^32 elements
  __shared__ Digit state[1];
  __shared__ unsigned slots[2];
  __shared__ unsigned warp_counts[WARPS];
  __shared__ unsigned keys[MAX_K];
  __shared__ index_t places[MAX_K];
  unsigned* const counts = reinterpret_cast<unsigned*>(memory);
  index_t* const ties = reinterpret_cast<index_t*>(memory);
  const WEFT_T* row = x + blockIdx.x * x_stride;
  const int thread = (int)threadIdx.x, copy = thread % COPIES;
  unsigned threshold = 0, mask = 0;
  unsigned long long due = (unsigned long long)k, equal = 0;
  for (int shift = 24; shift >= LAST_SHIFT; shift -= 8) {
    for (int d = thread; d < DIGITS * COPIES / 2; d += THREADS) memory[d] = 0;
    __syncthreads();
    for_each_key(row, columns, largest, [&](unsigned key, index_t) {
      if ((key & mask) == threshold) atomicAdd(counts + (key >> shift & 255) * COPIES + copy, 1u);
    });
    __syncthreads();
    for (int d = thread; d < DIGITS; d += THREADS) {
      unsigned long long total = 0;
      // Lanes begin at different copies, whose banks differ.
      for (int c = 0; c < COPIES; ++c) total += counts[d * COPIES + (c + d) % COPIES];
      totals[d] = total;
    }
    if (thread < 2) slots[thread] = 0;
    __syncthreads();
    if (thread < 32) find_digit(state[0], totals, due);
    __syncthreads();
    threshold |= (unsigned)state[0].digit << shift;
    mask |= 255u << shift;
    due = state[0].due, equal = state[0].equal;
    __syncthreads();  // all have read the digit before the next pass writes it
  }
  // Without a tie at the border every equal key is due, in any order: the sort below restores it. Few equal
  // keys are all collected, and those of lowest index taken.
  const bool takes_all = due == equal, collects = !takes_all && equal <= TIES;
  for_each_key(row, columns, largest, [&](unsigned key, index_t i) {
    key &= mask;
    if (key > threshold || (takes_all && key == threshold)) {
      const unsigned slot = atomicAdd(slots, 1u);
      keys[slot] = key, places[slot] = i;
    } else if (collects && key == threshold) {
      ties[atomicAdd(slots + 1, 1u)] = i;
    }
  });
  __syncthreads();
  unsigned taken = slots[0];
  for (int i = thread; collects && i < (int)equal; i += THREADS) {
    unsigned rank = 0;
    for (int j = 0; j < (int)equal; ++j) rank += ties[j] < ties[i];
    if (rank < due) keys[taken + rank] = threshold, places[taken + rank] = ties[i];
  }
  if (collects) __syncthreads();
  // Many equal keys: those of each THREADS neighbouring elements are numbered in order of their index.
  for (index_t start = 0; !takes_all && !collects && taken < k && start < columns; start += THREADS) {
    const bool hit = start + thread < columns && (key_of(row[start + thread], largest) & mask) == threshold;
    const unsigned votes = __ballot_sync(ALL, hit);
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

#ifndef ROWS_ALONE  // of a program for long rows, with more threads than lists have
// The best elements that a warp has seen: lane r has the r-th. `last` is the k-th, which others must beat.
struct List {
  unsigned key = 0, place = NOWHERE, last_key = 0, last_place = NOWHERE;
  bool is_empty = true;
};

// True if an element is earlier in the output than another: a larger key, or a lower place.
__device__ __forceinline__ bool is_before(unsigned key, unsigned place, unsigned other_key,
                                          unsigned other_place) {
  return key > other_key || (key == other_key && place < other_place);
}

// Sorts the elements of a warp's lanes (a bitonic network).
__device__ __forceinline__ void sort(unsigned& key, unsigned& place) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int size = 2; size <= 32; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const unsigned other_key = __shfl_xor_sync(ALL, key, step);
      const unsigned other_place = __shfl_xor_sync(ALL, place, step);
      const bool takes_first = ((lane & step) == 0) == ((lane & size) == 0);
      if (is_before(other_key, other_place, key, place) == takes_first) key = other_key, place = other_place;
    }
}

// Takes the k-th element of the list as the one that others must beat.
__device__ __forceinline__ void limit(List& list, int k) {
  list.last_key = __shfl_sync(ALL, list.key, k - 1);
  list.last_place = __shfl_sync(ALL, list.place, k - 1);
}

// Offers N elements of each lane to the list, whose places are `place` and those after it. A lane that has
// none offers nothing. Each turn inserts one of the elements that are still better than the k-th.
template <int N>
__device__ __forceinline__ void offer(List& list, const unsigned (&key)[N], unsigned place, bool has, int k) {
  const int lane = threadIdx.x % 32;
  unsigned left = has ? (1u << N) - 1 : 0;  // a bit for each element that has not been inserted
  if (list.is_empty && __ballot_sync(ALL, has)) {
    list.key = has ? key[0] : 0, list.place = has ? place : NOWHERE, list.is_empty = false;
    sort(list.key, list.place);
    limit(list, k);
    left &= ~1u;
  }
  for (;;) {
    unsigned better = 0;
#pragma unroll
    for (int j = 0; j < N; ++j)
      better |= (unsigned)is_before(key[j], place + j, list.last_key, list.last_place) << j;
    better &= left;
    const unsigned lanes = __ballot_sync(ALL, better != 0);
    if (!lanes) return;
    const int from = __ffs(lanes) - 1, own = __ffs(better) - 1;
    unsigned own_key = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) own_key = j == own ? key[j] : own_key;
    if (lane == from) left &= ~(1u << own);
    const unsigned new_key = __shfl_sync(ALL, own_key, from);
    const unsigned new_place = __shfl_sync(ALL, place + own, from);
    const int position = __popc(__ballot_sync(ALL, is_before(list.key, list.place, new_key, new_place)));
    const unsigned left_key = __shfl_up_sync(ALL, list.key, 1);
    const unsigned left_place = __shfl_up_sync(ALL, list.place, 1);
    if (lane == position) list.key = new_key, list.place = new_place;
    if (lane > position) list.key = left_key, list.place = left_place;
    limit(list, k);
  }
}

// Writes the first k elements of a warp's list to a row of the output.
__device__ __forceinline__ void write(const List& list, const WEFT_T* row, WEFT_T* values, index_t* indices,
                                      int k) {
  const int lane = threadIdx.x % 32;
  if (lane < k) values[lane] = row[list.place], indices[lane] = list.place;
}

// x, values, indices: as above, with `rows` rows of less than 2^32 - 1 columns, and k <= 32. A row has
// `parts` parts of part_columns, a multiple of VEC_WIDTH; each is read by WARPS_A_ROW warps. keys, places:
// (rows, parts, k), written if there are several parts.
extern "C" __global__ void __launch_bounds__(THREADS)
topk_lists(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ values, index_t* __restrict__ indices,
           unsigned* __restrict__ keys, unsigned* __restrict__ places, index_t rows, index_t columns,
           index_t x_stride, index_t k, index_t largest, index_t parts, index_t part_columns) {
  constexpr int VEC = VEC_WIDTH, STEP = WARPS_A_ROW * 32 * VEC;
  constexpr int UNROLL = WARPS_A_ROW > 1 ? 2 : 1;  // loads of a thread before the first is used
  __shared__ unsigned shared_keys[WARPS][32];
  __shared__ unsigned shared_places[WARPS][32];
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, member = warp % WARPS_A_ROW;
  const index_t part = (index_t)blockIdx.x * (WARPS / WARPS_A_ROW) + warp / WARPS_A_ROW;
  if (part >= rows * parts) return;  // a whole warp, in blocks of several rows, which have no barrier
  const WEFT_T* row = x + part / parts * x_stride;
  const index_t begin = part % parts * part_columns;
  const index_t end = begin + part_columns < columns ? begin + part_columns : columns;
  List list;
  for (index_t start = begin + member * 32 * VEC; start < end; start += STEP * UNROLL) {
    Vector<WEFT_T, VEC> v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const index_t at = start + u * STEP + lane * VEC;
      if (at < end) v[u] = *reinterpret_cast<const Vector<WEFT_T, VEC>*>(row + at);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const index_t at = start + u * STEP + lane * VEC;
      unsigned key[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) key[j] = key_of(v[u].at[j], largest);
      offer(list, key, (unsigned)at, at < end, (int)k);
    }
  }
  if constexpr (WARPS_A_ROW > 1) {
    shared_keys[warp][lane] = list.key, shared_places[warp][lane] = list.place;
    __syncthreads();
    if (warp) return;
    for (int w = 1; w < WARPS; ++w) {
      const unsigned key[1] = {shared_keys[w][lane]}, place = shared_places[w][lane];
      offer(list, key, place, place != NOWHERE, (int)k);
    }
  }
  if (parts == 1) {
    write(list, row, values + part * k, indices + part * k, (int)k);
  } else if (lane < k) {
    keys[part * k + lane] = list.key, places[part * k + lane] = list.place;
  }
}

// Joins the lists of the parts of a row: a warp for each row. All as above.
extern "C" __global__ void __launch_bounds__(THREADS)
topk_merge(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ values, index_t* __restrict__ indices,
           const unsigned* __restrict__ keys, const unsigned* __restrict__ places, index_t rows,
           index_t x_stride, index_t k, index_t parts) {
  const index_t row = (index_t)blockIdx.x * WARPS + threadIdx.x / 32, count = parts * k;
  if (row >= rows) return;  // a whole warp
  List list;
  for (index_t start = 0; start < count; start += 32) {
    const index_t i = start + threadIdx.x % 32;
    const unsigned key[1] = {i < count ? keys[row * count + i] : 0};
    const unsigned place = i < count ? places[row * count + i] : NOWHERE;
    offer(list, key, place, place != NOWHERE, (int)k);
  }
  write(list, x + row * x_stride, values + row * k, indices + row * k, (int)k);
}
#endif
