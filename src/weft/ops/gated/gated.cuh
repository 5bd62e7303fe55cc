// Gated activations, y = f(gate) up, elementwise over n elements, 16 bytes a thread and tensor.
//
// F returns an activation's value and slope from one exponential (elementwise_math.cuh). The backward
// recomputes both from the gate, which is cheaper than to store and read them. Bytes: 2n read + n written;
// backward: 3n read (the gradient, gate and up) + 2n written.
#pragma once
#include "elementwise.cuh"
#include "elementwise_math.cuh"

template <Activated (*F)(float)> struct GatedForward {
  template <int M>
  __device__ __forceinline__ void operator()(const float (&in)[2][M], float (&out)[1][M],
                                             index_t) const {
#pragma unroll
    for (int j = 0; j < M; ++j) out[0][j] = F(in[0][j]).value * in[1][j];
  }
};

// dgate = grad up f'(gate) and dup = grad f(gate), both from one exponential.
// in: grad, gate, up; out: dgate, dup.
template <Activated (*F)(float)> struct GatedBackward {
  template <int M>
  __device__ __forceinline__ void operator()(const float (&in)[3][M], float (&out)[2][M],
                                             index_t) const {
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const Activated f = F(in[1][j]);
      out[0][j] = in[0][j] * in[2][j] * f.slope;
      out[1][j] = in[0][j] * f.value;
    }
  }
};
