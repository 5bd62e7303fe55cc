// y = gelu(x + bias) over (rows, columns), forward and backward, 16 bytes a thread and tensor.
//
// Bytes: n read + n written; backward: 2n read + n written, and four bytes a column and strip.
#include "elementwise.cuh"
#include "elementwise_math.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int UNROLL = 2;

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

// A block has a strip of `each` rows by 32 N columns: a warp takes a row at a time, each lane N
// columns of it, whose sums stay in registers. One partial sum a column and strip is written.
template <int N>
__device__ __forceinline__ void backward(const WEFT_T* grad, const WEFT_T* x, const WEFT_T* bias,
                                         WEFT_T* dx, float* partial, index_t rows,
                                         index_t columns, index_t each) {
  using Pack = Vector<WEFT_T, N>;
  __shared__ float sums[WARPS][32 * N];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t left = (index_t)blockIdx.x * 32 * N, column = left + lane * N;
  const index_t start = (index_t)blockIdx.y * each;
  const index_t stop = start + each < rows ? start + each : rows;
  float total[N] = {}, b[N];
  if (column < columns) {
    const Pack held = *reinterpret_cast<const Pack*>(bias + column);
#pragma unroll
    for (int j = 0; j < N; ++j) b[j] = to_float(held.at[j]);
    for (index_t row = start + warp; row < stop; row += WARPS * UNROLL) {
      Pack xs[UNROLL], gs[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (row + u * WARPS < stop) {
          const index_t at = (row + u * WARPS) * columns + column;
          xs[u] = *reinterpret_cast<const Pack*>(x + at);
          gs[u] = *reinterpret_cast<const Pack*>(grad + at);
        }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * WARPS >= stop) continue;
        Pack out;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float d = to_float(gs[u].at[j]) * gelu(to_float(xs[u].at[j]) + b[j]).slope;
          out.at[j] = from_float<WEFT_T>(d);
          total[j] += d;
        }
        *reinterpret_cast<Pack*>(dx + (row + u * WARPS) * columns + column) = out;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sums[warp][lane * N + j] = total[j];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * N; i += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w][i];
    if (left + i < columns) partial[(index_t)blockIdx.y * columns + left + i] = sum;
  }
}

// grad, x, dx: (rows, columns) contiguous; bias: (columns,); partial: (strips, columns).
extern "C" __global__ void __launch_bounds__(THREADS)
bias_gelu_backward_wide(const WEFT_T* grad, const WEFT_T* x, const WEFT_T* bias, WEFT_T* dx,
                        float* partial, index_t rows, index_t columns, index_t each) {
  backward<Wide<WEFT_T>::N>(grad, x, bias, dx, partial, rows, columns, each);
}

extern "C" __global__ void __launch_bounds__(THREADS)
bias_gelu_backward_any(const WEFT_T* grad, const WEFT_T* x, const WEFT_T* bias, WEFT_T* dx,
                       float* partial, index_t rows, index_t columns, index_t each) {
  backward<1>(grad, x, bias, dx, partial, rows, columns, each);
}

// partial: (strips, columns); dbias: (columns,). A block of 512 has 32 columns; a warp adds every
// sixteenth strip, and the warps' sums are added in order.
extern "C" __global__ void __launch_bounds__(512)
bias_gelu_sum_partials(const float* partial, WEFT_T* dbias, index_t strips, index_t columns) {
  __shared__ float sums[16][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t column = (index_t)blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (index_t s = warp; s < strips; s += 16) sum += partial[s * columns + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < 16; ++w) sum += sums[w][lane];
  dbias[column] = from_float<WEFT_T>(sum);
}
