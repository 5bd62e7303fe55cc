// Element types and 16-byte vectors of the operators' kernels.
//
// WEFT_T is the storage type that a program is compiled for; arithmetic is in float.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef WEFT_T
#define WEFT_T float
#endif

typedef long long index_t;  // every size and index: tensors may have more than 2^31 elements

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// Round to nearest even, the rounding of torch's conversions.
template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// N elements that one aligned load or store moves. The widest access has 16 bytes: Wide<T>::N elements.
template <typename T, int N> struct alignas(sizeof(T) * N) Vector { T at[N]; };
template <typename T> struct Wide { static constexpr int N = 16 / sizeof(T); };

// True if an element is the upper half of a float: each of the two in a word converts in one instruction.
template <typename T> constexpr bool UPPER = false;
template <> constexpr bool UPPER<__nv_bfloat16> = true;

// Returns element j as a float.
template <typename T, int N>
__device__ __forceinline__ float element(const Vector<T, N>& v, int j) {
  return to_float(v.at[j]);
}

// bfloat16: shift or mask the word of two, one instruction per element. Extracting the 16-bit element first
// costs two instructions for every other element.
template <int N>
__device__ __forceinline__ float element(const Vector<__nv_bfloat16, N>& v, int j) {
  if constexpr (N % 2) return to_float(v.at[j]);
  unsigned word;
  memcpy(&word, &v.at[j / 2 * 2], sizeof(word));
  word = j % 2 ? word & 0xffff0000u : word << 16;
  float wide;
  memcpy(&wide, &word, sizeof(wide));
  return wide;
}
