// y = gelu(x + bias) over (rows, columns): each thread has one 16-byte vector of x and of the bias.
//
// The bias is small and read from the L1 or L2. x + bias stays in float32 and is not rounded before GELU.
// Bytes: n read + n written.
#include "elementwise.cuh"
#include "elementwise_math.cuh"

// Return the column of element `at`. Where the sizes allow, the division has 32 bits, a fifth of the 64-bit
// cost.
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
  elementwise_wide<1, 1>({{x}}, {{y}}, n, Forward{bias, columns, n < (1ll << 32)});
}

extern "C" __global__ void __launch_bounds__(THREADS)
bias_gelu_forward_any(const WEFT_T* x, WEFT_T* y, index_t n, const WEFT_T* bias, index_t columns) {
  elementwise_any<1, 1>({{x}}, {{y}}, n, Forward{bias, columns, n < (1ll << 32)});
}
