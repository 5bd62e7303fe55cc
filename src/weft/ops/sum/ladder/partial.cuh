// What the ladder's steps share: elements as they are read, and what short sums are added in.
//
// Every step adds at most a block's worth of elements in Short (float; double for double), and
// gives the block's sum as a double. The host runs the step again on those, until one is left.
#pragma once
#include "numeric.cuh"
#include "reduce.cuh"

__device__ __forceinline__ double widen(double v) { return v; }
template <typename T> __device__ __forceinline__ float widen(T v) { return to_float(v); }
using Short = decltype(widen(WEFT_T()));

struct AddShort {
  static __device__ __forceinline__ Short nothing() { return 0; }
  static __device__ __forceinline__ Short merge(Short a, Short b) { return a + b; }
};
