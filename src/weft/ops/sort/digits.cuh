// Keys, their digits, and the places of the elements of a tile after a stable sort by one digit.
//
// The elements of a warp lie one after another in the tile: element i of lane l is the warp's (32 i +
// l)-th. Each warp has a counter for each digit. Counters become places by a sum over the warps before,
// and over the lower digits. Then the warp takes its elements in order, 32 at a time: lanes with one digit
// find each other, read the counter, and the first of them raises it for all. Equal digits keep their
// order, so that the sort by digits from the lowest to the highest is a stable sort of the keys.
#pragma once
#include "numeric.cuh"

#ifndef KEY_BITS
#define KEY_BITS 32
#endif
#ifndef INFINITY_BITS
#define INFINITY_BITS 0  // bits of +Inf in a type of floats, 0 for signed integers
#endif
#ifndef THREADS
#define THREADS 256  // a multiple of 32 that divides 256, or more
#endif
#ifndef ITEMS
#define ITEMS 8  // elements of a thread
#endif
#ifndef PAIRS
#define PAIRS 0  // 1: indices are sorted too
#endif
#ifndef MATCH
#define MATCH 0  // 1: lanes of one digit find each other by match.any, 0: by eight ballots
#endif

template <int BITS> struct KeyOf;
template <> struct KeyOf<16> { typedef unsigned short type; };
template <> struct KeyOf<32> { typedef unsigned type; };
template <> struct KeyOf<64> { typedef unsigned long long type; };
typedef KeyOf<KEY_BITS>::type Key;  // the bits of an element, which are moved unchanged

constexpr int WARPS = THREADS / 32, TILE = THREADS * ITEMS;
constexpr int DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS, PASSES = KEY_BITS / DIGIT_BITS;
constexpr int OWNERS = THREADS < DIGITS ? THREADS : DIGITS;  // threads that own digits, so many each:
constexpr int OWNED = DIGITS / OWNERS;
constexpr unsigned ALL = 0xffffffffu;
constexpr unsigned LAST_DIGIT = DIGITS - 1;

// Returns an unsigned key in the order of the output. NaN is above all, -0 equals 0. `flip` has all bits set
// for the descending order, and none otherwise.
__device__ __forceinline__ Key ordered(Key bits, Key flip) {
  constexpr Key SIGN = (Key)1 << (KEY_BITS - 1);
  if (INFINITY_BITS == 0) return bits ^ SIGN ^ flip;
  Key key = bits & SIGN ? (Key)~bits : (Key)(bits | SIGN);
  if (bits == SIGN) key = SIGN;
  if ((Key)(bits & (Key)~SIGN) > (Key)INFINITY_BITS) key = (Key)~(Key)0;
  return key ^ flip;
}
__device__ __forceinline__ unsigned digit_of(Key bits, int shift, Key flip) {
  return (unsigned)(ordered(bits, flip) >> shift) & LAST_DIGIT;
}

// Sets `votes` to the lanes whose digit has this bit, and `inverted` to ~0 where the caller's has not. The
// compiler takes seven instructions for a bit from C++, and four from this. An emulator defines it itself.
#ifndef WEFT_SORT_PTX
__device__ __forceinline__ void vote(unsigned digit, unsigned bit, unsigned& votes, unsigned& inverted) {
  asm volatile("{ .reg .pred has; setp.ne.u32 has, %2, 0; vote.sync.ballot.b32 %0, has, 0xffffffff;"
               " selp.b32 %1, 0, 0xffffffff, has; }"
               : "=r"(votes), "=r"(inverted)
               : "r"(digit & bit));
}
// Returns a pointer to global memory, and hides how it was computed: the compiler would repeat that for
// every access.
template <typename T> __device__ __forceinline__ T* opaque(T* pointer) {
  asm volatile("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}
#endif

// Returns a bit for each lane with the caller's digit. All lanes of the warp call it.
__device__ __forceinline__ unsigned peers_of(unsigned digit) {
#if MATCH
  return __match_any_sync(ALL, (int)digit);
#else
  unsigned peers = ALL;
#pragma unroll
  for (int b = 0; b < DIGIT_BITS; ++b) {
    unsigned votes, inverted;
    vote(digit, 1u << b, votes, inverted);
    peers &= votes ^ inverted;
  }
  return peers;
#endif
}

// Returns the place of the caller's element and raises its warp's counter past all elements of that digit.
// All lanes of the warp call it.
__device__ __forceinline__ unsigned take_place(unsigned* warp_counts, unsigned digit) {
  const unsigned peers = peers_of(digit), below = (1u << threadIdx.x % 32) - 1;
  // All lanes read the counter, and the first of a digit writes it: an atomic addition by that lane would
  // need a branch, and a shuffle for the others.
  const unsigned first = warp_counts[digit];
  __syncwarp();
  if ((peers & below) == 0) warp_counts[digit] = first + __popc(peers);
  __syncwarp();
  return first + __popc(peers & below);
}

// Replaces each warp's counters of the caller's digits by the sums of the warps before, and returns the sums
// of all. Threads that own no digit have none. counts: (WARPS, DIGITS).
__device__ __forceinline__ void add_warps(unsigned* counts, unsigned (&totals)[OWNED]) {
#pragma unroll
  for (int j = 0; j < OWNED; ++j) {
    totals[j] = 0;
    if (threadIdx.x >= OWNERS) continue;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      unsigned& count = counts[w * DIGITS + threadIdx.x * OWNED + j];
      const unsigned own = count;
      count = totals[j];
      totals[j] += own;
    }
  }
}

// Returns the sum of the values of the threads before the caller. All threads of the block call it; it has a
// barrier inside. sums: WARPS words.
template <typename T> __device__ __forceinline__ T sum_before(T value, T* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T total = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T left = __shfl_up_sync(ALL, total, step);
    if (lane >= step) total += left;
  }
  if (lane == 31) sums[warp] = total;
  __syncthreads();
  T before = total - value;
  for (int w = 0; w < warp; ++w) before += sums[w];
  return before;
}

// Sets `starts` to where the caller's digits start, given how many there are of each.
template <typename T>
__device__ __forceinline__ void find_starts(const T (&totals)[OWNED], T (&starts)[OWNED], T* sums) {
  T own = 0;
#pragma unroll
  for (int j = 0; j < OWNED; ++j) own += totals[j];
  T start = sum_before(own, sums);
#pragma unroll
  for (int j = 0; j < OWNED; ++j) {
    starts[j] = start;
    start += totals[j];
  }
}

// Adds where a digit starts in the tile to the counters of all warps.
__device__ __forceinline__ void add_starts(unsigned* counts, const unsigned (&starts)[OWNED]) {
  if (threadIdx.x >= OWNERS) return;
#pragma unroll
  for (int j = 0; j < OWNED; ++j)
#pragma unroll
    for (int w = 0; w < WARPS; ++w) counts[w * DIGITS + threadIdx.x * OWNED + j] += starts[j];
}
