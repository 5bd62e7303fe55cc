// y = gelu(x + bias) over (rows, columns), 16 bytes a thread. Bytes: n read + n written.
#include "elementwise.cuh"
#include "elementwise_math.cuh"

// One exact column each: 32-bit division where the sizes allow, a fifth of the 64-bit one's cost.
__device__ __forceinline__ index_t column_of(index_t at, index_t columns, bool narrow) {
  return narrow ? (index_t)((unsigned)at % (unsigned)columns) : at % columns;
}

struct Forward {
  const WEFT_T* bias;
  index_t columns;
  bool narrow;
  template <int M>
  __device__ __forceinline__ void operator()(const float (&in)[1][M], float (&out)[1][M],
                                             index_t first) const {
    using Pack = Vector<WEFT_T, M>;
    const Pack b = *reinterpret_cast<const Pack*>(bias + column_of(first, columns, narrow));
#pragma unroll
    for (int j = 0; j < M; ++j) out[0][j] = gelu(in[0][j] + to_float(b.at[j])).value;
  }
};

// x, y: (n,), n a multiple of columns; bias: (columns,). Wide: 16 bytes divide a row.
extern "C" __global__ void __launch_bounds__(THREADS)
bias_gelu_forward_wide(const WEFT_T* x, WEFT_T* y, index_t n, const WEFT_T* bias,
                       index_t columns) {
  walk_wide<1, 1>({{x}}, {{y}}, n, Forward{bias, columns, n < (1ll << 32)});
}

extern "C" __global__ void __launch_bounds__(THREADS)
bias_gelu_forward_any(const WEFT_T* x, WEFT_T* y, index_t n, const WEFT_T* bias, index_t columns) {
  walk_each<1, 1>({{x}}, {{y}}, n, Forward{bias, columns, n < (1ll << 32)});
}
