// The walk of elementwise kernels: IN tensors of n elements in, OUT tensors out, in storage order.
//
// A functor is handed M neighbours of each tensor as floats, and the place of the first:
//   template <int M> void operator()(const float (&in)[IN][M], float (&out)[OUT][M], index_t first)
// walk_wide gives a thread one 16-byte vector of each tensor (M = Wide<WEFT_T>::N; a full SM keeps
// enough of them in flight, docs/log.md 2026-11-20), walk_any one element, at any alignment.
#pragma once
#include "numeric.cuh"

#ifndef THREADS
#define THREADS 128
#endif

template <int IN> struct From { const WEFT_T* at[IN]; };
template <int OUT> struct To { WEFT_T* at[OUT]; };

template <int IN, int OUT, typename F>
__device__ __forceinline__ void walk_any(From<IN> from, To<OUT> to, index_t i, index_t n, F f) {
  if (i >= n) return;
  float in[IN][1], out[OUT][1];
#pragma unroll
  for (int k = 0; k < IN; ++k) in[k][0] = to_float(from.at[k][i]);
  f(in, out, i);
#pragma unroll
  for (int k = 0; k < OUT; ++k) to.at[k][i] = from_float<WEFT_T>(out[k][0]);
}

// All pointers are 16-byte aligned. A block covers THREADS vectors; the last n % N elements are
// taken one by one by the first threads of the last block.
template <int IN, int OUT, typename F>
__device__ __forceinline__ void walk_wide(From<IN> from, To<OUT> to, index_t n, F f) {
  constexpr int N = Wide<WEFT_T>::N;
  using Pack = Vector<WEFT_T, N>;
  const index_t vectors = n / N, at = (index_t)blockIdx.x * THREADS + threadIdx.x;
  if (at < vectors) {
    Pack packs[IN];
#pragma unroll
    for (int k = 0; k < IN; ++k) packs[k] = reinterpret_cast<const Pack*>(from.at[k])[at];
    float in[IN][N], out[OUT][N];
#pragma unroll
    for (int k = 0; k < IN; ++k)
#pragma unroll
      for (int j = 0; j < N; ++j) in[k][j] = to_float(packs[k].at[j]);
    f(in, out, at * N);
#pragma unroll
    for (int k = 0; k < OUT; ++k) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < N; ++j) pack.at[j] = from_float<WEFT_T>(out[k][j]);
      reinterpret_cast<Pack*>(to.at[k])[at] = pack;
    }
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < N)
    walk_any<IN, OUT>(from, to, vectors * N + threadIdx.x, n, f);
}

// For pointers that are not 16-byte aligned: one element a thread.
template <int IN, int OUT, typename F>
__device__ __forceinline__ void walk_each(From<IN> from, To<OUT> to, index_t n, F f) {
  walk_any<IN, OUT>(from, to, (index_t)blockIdx.x * THREADS + threadIdx.x, n, f);
}
