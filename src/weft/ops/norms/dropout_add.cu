// s = dropout(x) + residual over n elements in row-major order, and its backward, dx = dropout(ds).
//
// For rows that the norm kernels do not take with dropout fused in (see with_cuda.py); the norm of s
// then runs as a kernel of its own. 16 bytes a thread and tensor; random numbers are computed in
// registers (philox_dropout.cuh). Bytes: 2n read + n written; backward: n read + n written.
#include "elementwise.cuh"
#include "philox_dropout.cuh"

struct Forward {
  Dropout dropout;
  template <int M>
  __device__ __forceinline__ void operator()(const float (&in)[2][M], float (&out)[1][M],
                                             index_t first) const {
#pragma unroll
    for (int j = 0; j < M; ++j) out[0][j] = in[0][j];
    dropout.apply(out[0], first);
#pragma unroll
    for (int j = 0; j < M; ++j) out[0][j] += in[1][j];
  }
};

struct Backward {
  Dropout dropout;
  template <int M>
  __device__ __forceinline__ void operator()(const float (&in)[1][M], float (&out)[1][M],
                                             index_t first) const {
#pragma unroll
    for (int j = 0; j < M; ++j) out[0][j] = in[0][j];
    dropout.apply(out[0], first);
  }
};

// x, r, s: (n,).
extern "C" __global__ void __launch_bounds__(THREADS)
dropout_add_wide(const WEFT_T* x, const WEFT_T* r, WEFT_T* s, index_t n, index_t seed,
                 index_t rule) {
  elementwise_wide<2, 1>({{x, r}}, {{s}}, n, Forward{{seed, rule}});
}

extern "C" __global__ void __launch_bounds__(THREADS)
dropout_add_any(const WEFT_T* x, const WEFT_T* r, WEFT_T* s, index_t n, index_t seed,
                index_t rule) {
  elementwise_any<2, 1>({{x, r}}, {{s}}, n, Forward{{seed, rule}});
}

// ds, dx: (n,).
extern "C" __global__ void __launch_bounds__(THREADS)
dropout_back_wide(const WEFT_T* ds, WEFT_T* dx, index_t n, index_t seed, index_t rule) {
  elementwise_wide<1, 1>({{ds}}, {{dx}}, n, Backward{{seed, rule}});
}

extern "C" __global__ void __launch_bounds__(THREADS)
dropout_back_any(const WEFT_T* ds, WEFT_T* dx, index_t n, index_t seed, index_t rule) {
  elementwise_any<1, 1>({{ds}}, {{dx}}, n, Backward{{seed, rule}});
}
