// What a product's epilogue computes from its float32 sums, two adjacent columns at a time.
#pragma once
#include "elementwise_math.cuh"
#include "numeric.cuh"

#ifndef EPILOGUE
#define EPILOGUE 0
#endif

namespace {

using T = WEFT_T;
// c = the sums; plus a bias; then GELU (tanh form), also with its input as a second output; or plus a
// residual.
enum { PLAIN, BIAS, GELU, GELU_PRE, RESIDUAL };

// GELU takes two operations of the special-function unit an element, as long as a product with K = 256. The
// form with one has an error of 2^-11 of x: an eighth of bfloat16's last place, but one of float16's.
template <typename U> __device__ __forceinline__ float gelu_value(float x) { return gelu(x).value; }
template <> __device__ __forceinline__ float gelu_value<__nv_bfloat16>(float x) { return gelu_by_tanh(x); }

__device__ __forceinline__ void activate(float (&two)[2]) {
  two[0] = gelu_value<T>(two[0]);
  two[1] = gelu_value<T>(two[1]);
}

__device__ __forceinline__ void add(float (&two)[2], const Vector<T, 2>& addends) {
  two[0] += to_float(addends.at[0]);
  two[1] += to_float(addends.at[1]);
}

__device__ __forceinline__ Vector<T, 2> as_pair(unsigned word) {
  Vector<T, 2> two;
  memcpy(&two, &word, 4);
  return two;
}

__device__ __forceinline__ unsigned rounded(const float (&two)[2]) {
  const T elements[2] = {from_float<T>(two[0]), from_float<T>(two[1])};
  unsigned word;
  memcpy(&word, elements, 4);
  return word;
}

// The thread's two of each 8 columns of the bias; zeros from column `columns` on, with WHOLE a multiple of 8.
template <bool WHOLE, int COUNT>
__device__ __forceinline__ void load_bias(Vector<T, 2> (&pairs)[COUNT], const T* bias, int columns) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if constexpr (WHOLE) {
      pairs[i] = i * 8 < columns
                     ? *reinterpret_cast<const Vector<T, 2>*>(bias + i * 8 + threadIdx.x % 4 * 2)
                     : Vector<T, 2>{};
    } else {
      const int column = i * 8 + threadIdx.x % 4 * 2;
      pairs[i] = {column < columns ? bias[column] : T{}, column + 1 < columns ? bias[column + 1] : T{}};
    }
  }
}

// Eight columns of the bias, at a multiple of 16 bytes; zeros from column `columns` on.
__device__ __forceinline__ void load_bias_vector(Vector<T, 2> (&pairs)[4], const T* bias, int columns) {
  Vector<T, 8> eight;
  if (columns >= 8) eight = *reinterpret_cast<const Vector<T, 8>*>(bias);
  else
#pragma unroll
    for (int i = 0; i < 8; ++i) eight.at[i] = i < columns ? bias[i] : T{};
  memcpy(pairs, &eight, sizeof eight);
}

}  // namespace
