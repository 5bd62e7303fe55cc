// The bin of an element, shared by all kernels of the histogram; spec.py has the definition.
#pragma once
#include "numeric.cuh"

constexpr int NONE = -1;  // the bin of an element that is not counted

struct Bins {
  int count;
  float low, high, scale;  // of floats
};

__device__ __forceinline__ int bin_of(float v, const Bins& bins) {
  // A subtraction and then a multiplication: nothing can be fused, and both round to the nearest.
  const float product = __fmul_rn(__fsub_rn(v, bins.low), bins.scale);
  return v >= bins.low && v <= bins.high ? min((int)product, bins.count - 1) : NONE;
}
__device__ __forceinline__ int bin_of(__half v, const Bins& bins) { return bin_of(to_float(v), bins); }
__device__ __forceinline__ int bin_of(__nv_bfloat16 v, const Bins& bins) { return bin_of(to_float(v), bins); }
__device__ __forceinline__ int bin_of(int v, const Bins& bins) {
  return v >= 0 && v < bins.count ? v : NONE;
}
__device__ __forceinline__ int bin_of(unsigned char v, const Bins& bins) { return bin_of((int)v, bins); }

// Returns the bins of a launch: scalars come from the host as float64, and are float32 numbers.
__device__ __forceinline__ Bins bins_from(index_t count, double low, double high, double scale) {
  return {(int)count, (float)low, (float)high, (float)scale};
}

typedef unsigned long long Count;
