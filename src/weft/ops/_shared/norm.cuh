// What the norms' kernels share: accesses of ACCESS elements, sums over a block with one barrier.
//
// CENTRED is layer norm; without it there is no mean and no bias. ADD takes a second tensor: what
// is normalised is s = x + r as rounded, an output too.
#pragma once
#include "numeric.cuh"
#include "reduce.cuh"

#ifndef ACCESS
#define ACCESS (16 / sizeof(WEFT_T))
#endif
#ifndef WEFT_W
#define WEFT_W WEFT_T
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef CENTRED
#define CENTRED 0
#endif
#ifndef ADD
#define ADD 0
#endif

constexpr int N = ACCESS;
using Pack = Vector<WEFT_T, N>;
using Weights = Vector<WEFT_W, N>;

template <int K> struct Sums { float at[K]; };

// Sums over the block, one barrier. Two scratches (32 each, shared) used by turns need no other.
template <int K>
__device__ __forceinline__ Sums<K> block_sums(Sums<K> v, Sums<K>* scratch) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < K; ++k) v.at[k] = warp_sum(v.at[k]);
  if (lane == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  const bool there = lane < THREADS / 32;
#pragma unroll
  for (int k = 0; k < K; ++k) v.at[k] = warp_sum(there ? scratch[lane].at[k] : 0.0f);
  return v;
}

// 1 / sqrt(v), rounded right: once a row, and shared by all of it.
__device__ __forceinline__ float inverse_root(float v) { return __frcp_rn(__fsqrt_rn(v)); }

// Not below 0, and a NaN stays one.
__device__ __forceinline__ float not_below_zero(float v) { return v < 0.0f ? 0.0f : v; }

__device__ __forceinline__ Pack zeros() {
  Pack p;
#pragma unroll
  for (int j = 0; j < N; ++j) p.at[j] = from_float<WEFT_T>(0.0f);
  return p;
}

// x + r, rounded to the dtype.
__device__ __forceinline__ Pack added(const Pack& x, const Pack& r) {
  Pack s;
#pragma unroll
  for (int j = 0; j < N; ++j) s.at[j] = from_float<WEFT_T>(to_float(x.at[j]) + to_float(r.at[j]));
  return s;
}
