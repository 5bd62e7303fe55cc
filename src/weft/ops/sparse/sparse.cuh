// Shared by the kernels of sparse products: element types, sums, streamed loads, and the merge path.
#pragma once
#include "numeric.cuh"

#ifndef OFFSET_BITS
#define OFFSET_BITS 32
#endif
#ifndef VEC_WIDTH
#define VEC_WIDTH 4  // nonzeros of an access; 1 where values and columns are not aligned for 4
#endif

#ifndef HINT
#define HINT 1  // caches that the matrix passes, see load_streamed
#endif

constexpr unsigned ALL = 0xffffffffu;

template <int BITS> struct Offset { typedef int type; };
template <> struct Offset<64> { typedef long long type; };
typedef Offset<OFFSET_BITS>::type offset_t;

// Sums are in float, or in double for that type.
template <typename T> struct Accumulator { typedef float type; };
template <> struct Accumulator<double> { typedef double type; };
typedef Accumulator<WEFT_T>::type acc_t;

template <typename T> __device__ __forceinline__ acc_t widen(T v) {
  if constexpr (sizeof(T) == 8) return v;
  else return to_float(v);
}
template <typename T> __device__ __forceinline__ T narrow(acc_t v) {
  if constexpr (sizeof(T) == 8) return v;
  else return from_float<T>(v);
}

// Columns have 31 bits: as an unsigned number a negative one is larger than any number of columns.
__device__ __forceinline__ bool is_column(int column, index_t columns) {
  return (unsigned)column < (unsigned)columns;
}
// Returns x at a column. A column out of range is never used as an address: it makes the row NaN.
__device__ __forceinline__ acc_t gather(const WEFT_T* __restrict__ x, int column, index_t columns) {
  return is_column(column, columns) ? widen(x[column]) : acc_t(__int_as_float(0x7fc00000));
}

// Limits of row `row`'s nonzeros, whatever the offsets say: no access leaves the arrays.
__device__ __forceinline__ index_t row_begin(const offset_t* offsets, index_t row) {
  const index_t begin = offsets[row];
  return begin < 0 ? 0 : begin;
}
__device__ __forceinline__ index_t row_end(const offset_t* offsets, index_t row, index_t nonzeros) {
  const index_t end = offsets[row + 1];
  return end > nonzeros ? nonzeros : end;
}

// Loads 16 or 8 bytes that are read once. HINT 0: they leave the caches first. 1: L1 does not take them, so
// that x has it alone. 2: as 1, and they leave L2 first.
#ifndef WEFT_STREAMED_LOADS  // an emulator has its own
__device__ __forceinline__ uint4 load_streamed(const uint4* from) {
#if HINT == 0
  return __ldcs(from);
#else
  uint4 v;
#if HINT == 1
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
#else
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "l"(policy));
#endif
  return v;
#endif
}
__device__ __forceinline__ uint2 load_streamed(const uint2* from) {
#if HINT == 0
  return __ldcs(from);
#else
  uint2 v;
#if HINT == 1
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
#else
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y) : "l"(from), "l"(policy));
#endif
  return v;
#endif
}
#endif

// Loads N adjacent elements that are read once, in accesses of at most 16 bytes.
template <typename T, int N> __device__ __forceinline__ Vector<T, N> load_once(const T* from) {
  constexpr int BYTES = sizeof(T) * N;
  Vector<T, N> pack;
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 word = load_streamed(reinterpret_cast<const uint4*>(from) + i);
      memcpy(reinterpret_cast<char*>(&pack) + i * 16, &word, 16);
    }
  } else if constexpr (BYTES == 8 && N > 1) {
    const uint2 word = load_streamed(reinterpret_cast<const uint2*>(from));
    memcpy(&pack, &word, 8);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.at[i] = from[i];
  }
  return pack;
}

// The merge path (Merrill and Garland, SC16): the ends of the rows and the nonzeros form one list, in which
// the end of a row comes after its nonzeros. The end of row r stands at position offsets[r + 1] + r. Equal
// shares of this list are equal work, whatever the lengths of the rows.
//
// Returns the number of rows that end before `position`, to every lane of the calling warp. Each round asks
// 32 rows at once, so that 2^20 rows take four loads one after another, where halving takes twenty.
__device__ __forceinline__ index_t rows_before(const offset_t* __restrict__ offsets, index_t position,
                                               index_t rows, index_t nonzeros) {
  index_t low = position > nonzeros ? position - nonzeros : 0, high = position < rows ? position : rows;
  const int lane = threadIdx.x % 32;
  while (low < high) {
    const index_t step = (high - low + 31) / 32, row = low + lane * step + step - 1;
    const bool before = row < high && (index_t)offsets[row + 1] + row < position;
    low += __popc(__ballot_sync(ALL, before)) * step;
    // The last row of the next part does not end before `position`, or lies past the end.
    high = low + step - 1 < high ? low + step - 1 : high;
  }
  return low;
}
