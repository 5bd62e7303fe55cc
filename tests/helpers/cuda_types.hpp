// CUDA's keywords, element types and conversions for emulators that g++ compiles.
#pragma once
#include <setjmp.h>
#include <ucontext.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>
#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Index { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (bits & 31));
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct __half { _Float16 v; };
struct __nv_bfloat16 { unsigned short v; };
inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline float __half2float(__half v) { return (float)v.v; }
inline __half __float2half_rn(float v) { return {(_Float16)v}; }
inline float __bfloat162float(__nv_bfloat16 v) { return __int_as_float((unsigned)v.v << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const unsigned bits = std::bit_cast<unsigned>(v);
  if (v != v) return {0x7fc0};
  return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
inline int __popc(unsigned v) { return std::popcount(v); }
inline int __ffs(unsigned v) { return v ? std::countr_zero(v) + 1 : 0; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdividef(float a, float b) { return a / b; }
using std::fmaf, std::fmaxf, std::log2f, std::max, std::min;
#include "numeric.cuh"
