// Dropout over n elements in row-major order, 16 bytes a thread; the random numbers are made in
// registers, a block of Philox for eight neighbours (philox_dropout.cuh).
//
// Bytes: n read + n written. The backward is the same kernel, from gradient to gradient.
#include "elementwise.cuh"
#include "philox_dropout.cuh"

struct Apply {
  Dropout dropout;
  template <int M>
  __device__ __forceinline__ void operator()(const float (&in)[1][M], float (&out)[1][M],
                                             index_t first) const {
#pragma unroll
    for (int j = 0; j < M; ++j) out[0][j] = in[0][j];
    dropout.apply(out[0], first);
  }
};

// x, y: (n,).
extern "C" __global__ void __launch_bounds__(THREADS)
dropout_apply_wide(const WEFT_T* x, WEFT_T* y, index_t n, index_t seed, index_t rule) {
  elementwise_wide<1, 1>({{x}}, {{y}}, n, Apply{{seed, rule}});
}

extern "C" __global__ void __launch_bounds__(THREADS)
dropout_apply_any(const WEFT_T* x, WEFT_T* y, index_t n, index_t seed, index_t rule) {
  elementwise_any<1, 1>({{x}}, {{y}}, n, Apply{{seed, rule}});
}
