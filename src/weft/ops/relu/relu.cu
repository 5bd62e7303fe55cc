// ReLU, forward and backward, elementwise over n elements in storage order, 16 bytes a thread.
//
// Bytes: n read + n written (backward: 2n read + n written). `v <= 0` is false for NaN, which
// therefore passes.
#include "elementwise.cuh"

struct Forward {
  template <int M>
  __device__ void operator()(const float (&in)[1][M], float (&out)[1][M], index_t) const {
#pragma unroll
    for (int j = 0; j < M; ++j) out[0][j] = in[0][j] <= 0.0f ? 0.0f : in[0][j];
  }
};

struct Backward {
  template <int M>
  __device__ void operator()(const float (&in)[2][M], float (&out)[1][M], index_t) const {
#pragma unroll
    for (int j = 0; j < M; ++j) out[0][j] = in[1][j] <= 0.0f ? 0.0f : in[0][j];
  }
};

// x, y: (n,).
extern "C" __global__ void __launch_bounds__(THREADS)
relu_forward_wide(const WEFT_T* x, WEFT_T* y, index_t n) {
  walk_wide<1, 1>({{x}}, {{y}}, n, Forward{});
}

extern "C" __global__ void __launch_bounds__(THREADS)
relu_forward_any(const WEFT_T* x, WEFT_T* y, index_t n) {
  walk_each<1, 1>({{x}}, {{y}}, n, Forward{});
}

// grad, y, dx: (n,).
extern "C" __global__ void __launch_bounds__(THREADS)
relu_backward_wide(const WEFT_T* grad, const WEFT_T* y, WEFT_T* dx, index_t n) {
  walk_wide<2, 1>({{grad, y}}, {{dx}}, n, Backward{});
}

extern "C" __global__ void __launch_bounds__(THREADS)
relu_backward_any(const WEFT_T* grad, const WEFT_T* y, WEFT_T* dx, index_t n) {
  walk_each<2, 1>({{grad, y}}, {{dx}}, n, Backward{});
}
