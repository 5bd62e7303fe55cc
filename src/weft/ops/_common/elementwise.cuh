// Elementwise kernels: IN input tensors and OUT output tensors of n elements each, in storage order.
//
// A functor takes M adjacent elements of each input as floats, and the index of the first:
//   template <int M> void operator()(const float (&in)[IN][M], float (&out)[OUT][M], index_t first)
// elementwise_wide gives a thread one 16-byte vector of each tensor (M = Wide<WEFT_T>::N). More vectors in a
// thread are slower: a full SM has enough loads in flight without them (docs/log.md, 2026-11-20).
// elementwise_any gives a thread one element, at any alignment.
#pragma once
#include "numeric.cuh"

#ifndef THREADS
#define THREADS 128
#endif

template <int IN> struct Inputs { const WEFT_T* data[IN]; };
template <int OUT> struct Outputs { WEFT_T* data[OUT]; };

template <int IN, int OUT, typename F>
__device__ __forceinline__ void apply_to_element(Inputs<IN> inputs, Outputs<OUT> outputs, index_t i,
                                                 index_t n, F f) {
  // The last block has threads past the end.
  if (i >= n) return;
  float in[IN][1], out[OUT][1];
#pragma unroll
  for (int k = 0; k < IN; ++k) in[k][0] = to_float(inputs.data[k][i]);
  f(in, out, i);
#pragma unroll
  for (int k = 0; k < OUT; ++k) outputs.data[k][i] = from_float<WEFT_T>(out[k][0]);
}

// For pointers that are all 16-byte aligned. A block covers THREADS vectors. The last n % N elements do not
// fill a vector: the first threads of the last block take one each.
template <int IN, int OUT, typename F>
__device__ __forceinline__ void elementwise_wide(Inputs<IN> inputs, Outputs<OUT> outputs, index_t n, F f) {
  constexpr int N = Wide<WEFT_T>::N;
  using Pack = Vector<WEFT_T, N>;
  const index_t vectors = n / N, i = (index_t)blockIdx.x * THREADS + threadIdx.x;
  if (i < vectors) {
    // All loads come before the first use, so that they are in flight together.
    Pack packs[IN];
#pragma unroll
    for (int k = 0; k < IN; ++k) packs[k] = reinterpret_cast<const Pack*>(inputs.data[k])[i];
    float in[IN][N], out[OUT][N];
#pragma unroll
    for (int k = 0; k < IN; ++k)
#pragma unroll
      for (int j = 0; j < N; ++j) in[k][j] = to_float(packs[k].at[j]);
    f(in, out, i * N);
#pragma unroll
    for (int k = 0; k < OUT; ++k) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < N; ++j) pack.at[j] = from_float<WEFT_T>(out[k][j]);
      reinterpret_cast<Pack*>(outputs.data[k])[i] = pack;
    }
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < N)
    apply_to_element<IN, OUT>(inputs, outputs, vectors * N + threadIdx.x, n, f);
}

// For pointers of any alignment: one element a thread.
template <int IN, int OUT, typename F>
__device__ __forceinline__ void elementwise_any(Inputs<IN> inputs, Outputs<OUT> outputs, index_t n, F f) {
  apply_to_element<IN, OUT>(inputs, outputs, (index_t)blockIdx.x * THREADS + threadIdx.x, n, f);
}
