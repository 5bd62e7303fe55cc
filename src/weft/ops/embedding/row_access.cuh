// A lane's share of a row: N elements that one access moves, and sums of them.
//
// A slice is LANES * N columns. A group is LANES lanes, which process one row of a slice at a time. Sums are
// in float, in a fixed order.
#pragma once
#include "numeric.cuh"

#ifndef ACCESS
#define ACCESS (16 / sizeof(WEFT_T))
#endif
#ifndef LANES
#define LANES 32
#endif
constexpr int N = ACCESS, GROUPS = 32 / LANES;
static_assert(LANES == 32 || LANES == 16, "a warp is one group or two");
constexpr unsigned FULL_MASK = 0xffffffffu;
using Floats = Vector<float, N>;

// An access in 32-bit registers: kept as 2-byte elements, each would take a register while it is loaded.
constexpr int BYTES = N * sizeof(WEFT_T), WORDS = BYTES < 4 ? 1 : BYTES / 4;
constexpr int E = N / WORDS;
constexpr int LOADS_IN_FLIGHT = BYTES < 16 ? 16 : 8;  // loads of a lane in flight
template <int BYTES> struct Word { using type = unsigned; };
template <> struct Word<2> { using type = unsigned short; };
struct alignas(BYTES) Pack {
  // alignas(BYTES) lets the compiler move the whole struct with one load or store.
  Word<BYTES>::type word[WORDS];
};

// Streaming accesses (evict first): outputs, and the last read of a gradient, must not evict from the L2 what
// is read again.
template <int BYTES> struct Streamed {
  static __device__ __forceinline__ void store(WEFT_T* to, const Pack& p) {
    *reinterpret_cast<Pack*>(to) = p;
  }
  static __device__ __forceinline__ Pack load(const WEFT_T* from) {
    return *reinterpret_cast<const Pack*>(from);
  }
};
template <typename Access> struct StreamedAs {
  static __device__ __forceinline__ void store(WEFT_T* to, const Pack& p) {
    __stcs(reinterpret_cast<Access*>(to), *reinterpret_cast<const Access*>(&p));
  }
  static __device__ __forceinline__ Pack load(const WEFT_T* from) {
    const Access in = __ldcs(reinterpret_cast<const Access*>(from));
    return *reinterpret_cast<const Pack*>(&in);
  }
};
template <> struct Streamed<16> : StreamedAs<uint4> {};
template <> struct Streamed<8> : StreamedAs<uint2> {};

__device__ __forceinline__ Pack load(const WEFT_T* from) {
  return *reinterpret_cast<const Pack*>(from);
}

// Prefetch a line of memory into the L2; nothing waits for it.
__device__ __forceinline__ void prefetch_l2(const void* at) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

__device__ __forceinline__ void unpack(const Pack& p, float (&to)[N]) {
#pragma unroll
  for (int k = 0; k < WORDS; ++k) {
    if constexpr (UPPER<WEFT_T> && E == 2) {
      to[2 * k] = __int_as_float((int)(p.word[k] << 16));
      to[2 * k + 1] = __int_as_float((int)(p.word[k] & 0xffff0000u));
    } else {
      // memcpy between registers compiles to no instruction; a cast of the pointer would break the aliasing
      // rules.
      WEFT_T at[E];
      memcpy(at, &p.word[k], sizeof(at));
#pragma unroll
      for (int j = 0; j < E; ++j) to[k * E + j] = to_float(at[j]);
    }
  }
}

__device__ __forceinline__ void add(float (&sum)[N], const float (&v)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) sum[j] += v[j];
}

__device__ __forceinline__ void add(float (&sum)[N], const Pack& p) {
  float v[N];
  unpack(p, v);
  add(sum, v);
}

__device__ __forceinline__ Pack packed(const float (&sum)[N]) {
  Pack p;
#pragma unroll
  for (int k = 0; k < WORDS; ++k) {
    WEFT_T at[E];
#pragma unroll
    for (int j = 0; j < E; ++j) at[j] = from_float<WEFT_T>(sum[k * E + j]);
    memcpy(&p.word[k], at, sizeof(at));
  }
  return p;
}

__device__ __forceinline__ void store(WEFT_T* to, const float (&sum)[N]) {
  Streamed<sizeof(Pack)>::store(to, packed(sum));
}

__device__ __forceinline__ void clear(float (&sum)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) sum[j] = 0;
}

// Write one row of dpositions at this lane's columns: the sum of the position's tokens, one sequence after
// another, so that the bits do not depend on the number of loads in flight.
__device__ __forceinline__ void sum_place(const WEFT_T* grad, WEFT_T* dpositions, index_t t,
                                          int batch, index_t length, index_t columns,
                                          index_t stride) {
  float sum[N];
  clear(sum);
  const WEFT_T* next = grad + t * stride;
  const index_t step = length * stride;
  int b = t < length ? 0 : batch;
  // LOADS_IN_FLIGHT loads before the first addition: the rows of one position are length * stride apart, so
  // that no load hits a line of another.
  for (; b + LOADS_IN_FLIGHT <= batch; b += LOADS_IN_FLIGHT) {
    Pack in[LOADS_IN_FLIGHT];
#pragma unroll
    for (int u = 0; u < LOADS_IN_FLIGHT; ++u, next += step) in[u] = load(next);
#pragma unroll
    for (int u = 0; u < LOADS_IN_FLIGHT; ++u) add(sum, in[u]);
  }
#pragma unroll 4
  for (; b < batch; ++b, next += step) add(sum, load(next));
  store(dpositions + t * columns, sum);
}
