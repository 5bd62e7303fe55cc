// ReLU, forward and backward, over n elements in storage order: one 16-byte vector of each tensor for a
// thread.
//
// The comparison is `v <= 0 ? 0 : v`: it is false for NaN, so that a NaN propagates as in torch. fmaxf(v, 0)
// would drop it. The backward reads the output y, whose sign is that of x: x need not be saved. Bytes: n read
// + n written (backward: 2n read + n written).
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
  elementwise_wide<1, 1>({{x}}, {{y}}, n, Forward{});
}

extern "C" __global__ void __launch_bounds__(THREADS)
relu_forward_any(const WEFT_T* x, WEFT_T* y, index_t n) {
  elementwise_any<1, 1>({{x}}, {{y}}, n, Forward{});
}

// grad, y, dx: (n,).
extern "C" __global__ void __launch_bounds__(THREADS)
relu_backward_wide(const WEFT_T* grad, const WEFT_T* y, WEFT_T* dx, index_t n) {
  elementwise_wide<2, 1>({{grad, y}}, {{dx}}, n, Backward{});
}

extern "C" __global__ void __launch_bounds__(THREADS)
relu_backward_any(const WEFT_T* grad, const WEFT_T* y, WEFT_T* dx, index_t n) {
  elementwise_any<2, 1>({{grad, y}}, {{dx}}, n, Backward{});
}
