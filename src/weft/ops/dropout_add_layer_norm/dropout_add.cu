// s = dropout(x) + residual over n elements in row-major order, and the way back: dx = dropout(ds).
//
// 16 bytes a thread and tensor; the random words are made in registers (philox.cuh). Bytes: 2n read
// + n written; backward: n read + n written. The norm of s is taken by the norms' own kernels.
#include "elementwise.cuh"
#include "philox.cuh"

struct Apply {
  Dropout dropout;
  template <int M>
  __device__ __forceinline__ void drop(const float (&in)[M], float (&out)[M],
                                       index_t first) const {
#pragma unroll
    for (int j = 0; j < M; ++j) out[j] = in[j];
    if constexpr (M == 1)
      out[0] = dropout.apply(in[0], first);
    else
      dropout.apply(out, first);
  }
};

struct Forward : Apply {
  template <int M>
  __device__ __forceinline__ void operator()(const float (&in)[2][M], float (&out)[1][M],
                                             index_t first) const {
    drop(in[0], out[0], first);
#pragma unroll
    for (int j = 0; j < M; ++j) out[0][j] += in[1][j];
  }
};

struct Backward : Apply {
  template <int M>
  __device__ __forceinline__ void operator()(const float (&in)[1][M], float (&out)[1][M],
                                             index_t first) const {
    drop(in[0], out[0], first);
  }
};

__device__ __forceinline__ Dropout made(index_t seed, index_t threshold, double scale) {
  return {(unsigned long long)seed, (unsigned)threshold, (float)scale};
}

// x, r, s: (n,); an element is kept where its word is at least `threshold`, a 32-bit number.
extern "C" __global__ void __launch_bounds__(THREADS)
dropout_add_wide(const WEFT_T* x, const WEFT_T* r, WEFT_T* s, index_t n, index_t seed,
                 index_t threshold, double scale) {
  walk_wide<2, 1>({{x, r}}, {{s}}, n, Forward{{made(seed, threshold, scale)}});
}

extern "C" __global__ void __launch_bounds__(THREADS)
dropout_add_any(const WEFT_T* x, const WEFT_T* r, WEFT_T* s, index_t n, index_t seed,
                index_t threshold, double scale) {
  walk_each<2, 1>({{x, r}}, {{s}}, n, Forward{{made(seed, threshold, scale)}});
}

// ds, dx: (n,).
extern "C" __global__ void __launch_bounds__(THREADS)
dropout_back_wide(const WEFT_T* ds, WEFT_T* dx, index_t n, index_t seed, index_t threshold,
                  double scale) {
  walk_wide<1, 1>({{ds}}, {{dx}}, n, Backward{{made(seed, threshold, scale)}});
}

extern "C" __global__ void __launch_bounds__(THREADS)
dropout_back_any(const WEFT_T* ds, WEFT_T* dx, index_t n, index_t seed, index_t threshold,
                 double scale) {
  walk_each<1, 1>({{ds}}, {{dx}}, n, Backward{{made(seed, threshold, scale)}});
}
