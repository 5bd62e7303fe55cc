// dx = grad gelu'(x + bias) over (rows, columns), and the sums of its columns, dbias.
//
// A block sums a small chunk of rows; a second kernel adds the chunks. The order is fixed, so that each run
// gives the same bits. Bytes: 2n read + n written; 4 for each column and chunk, written and read from the L2.
#include "elementwise_math.cuh"
#include "numeric.cuh"
#include "overlap.cuh"

// Shape of a block: GROUPS warps on different rows, ACROSS warps side by side on the columns. A warp has
// AHEAD rows in flight. BLOCKS blocks fit on an SM at once, which bounds the registers.
#ifndef BACK_WARPS
#define BACK_WARPS 16
#endif
#ifndef GROUPS
#define GROUPS 16
#endif
#ifndef AHEAD
#define AHEAD 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
constexpr int BACK_THREADS = BACK_WARPS * 32, ACROSS = BACK_WARPS / GROUPS;

// An access of N elements as one word or vector, whatever its elements are. The compiler stores a struct of
// eight halves as four words, and each of these stores requests its memory sector again.
template <int BYTES> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<16> { using type = uint4; };
template <int N> struct Access {
  using W = typename Word<N * sizeof(WEFT_T)>::type;
  static __device__ __forceinline__ W load(const WEFT_T* from) {
    return *reinterpret_cast<const W*>(from);
  }
  static __device__ __forceinline__ void store(WEFT_T* to, const W& v) {
    *reinterpret_cast<W*>(to) = v;
  }
  static __device__ __forceinline__ void unpack(const W& from, float (&to)[N]) {
    WEFT_T at[N];
    memcpy(at, &from, sizeof(at));
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = to_float(at[j]);
    if constexpr (UPPER<WEFT_T>) {
      unsigned word[(sizeof(W) + 3) / 4] = {};
      memcpy(word, &from, sizeof(W));
#pragma unroll
      for (int j = 1; j < N; j += 2) to[j] = __uint_as_float(word[j / 2] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ W pack(const float (&from)[N]) {
    WEFT_T at[N];
#pragma unroll
    for (int j = 0; j < N; ++j) at[j] = from_float<WEFT_T>(from[j]);
    W to;
    memcpy(&to, at, sizeof(to));
    return to;
  }
};

// GELU's slope s + x s (1 - s) z', with s = sigmoid(z). For two-byte types 1 - s is always computed as e s,
// which saves two instructions. e = exp(-z) is clamped to 2^127: s is then flushed to 0, which is the right
// value.
__device__ __forceinline__ float slope(float x) {
  if constexpr (sizeof(WEFT_T) > 2) return gelu(x).slope;
  const float w = x * x;
  float e, s;
  const float power = fminf(x * fmaf(-0.1029432f, w, -2.3022082f), 127.0f);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(power));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
  // w is clamped to a finite value: 0 * inf would turn a slope of exactly 0 or 1 into NaN.
  const float inner = fmaf(0.21406445f, fminf(w, 1e30f), 1.5957691f);
  return fmaf(x * s * (e * s), inner, s);
}

// A block has `each` rows of 32 N ACROSS columns. A warp takes every GROUPS-th row, and a lane N columns of
// it, whose sums stay in registers. A row's loads are issued AHEAD rows of its warp before it is needed. The
// block writes one partial sum for each column. Blocks are small and many, so that no SM is idle at the end.
template <int N>
__device__ __forceinline__ void backward(const WEFT_T* grad, const WEFT_T* x, const WEFT_T* bias,
                                         WEFT_T* dx, float* partial, index_t rows,
                                         index_t columns, index_t each, index_t across) {
  using A = Access<N>;
  launch_dependents();
  // Stored as [element][lane]: neighbouring lanes write neighbouring words, without bank conflicts for any N.
  __shared__ float sums[GROUPS][ACROSS * 32 * N];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / ACROSS, mine = (warp % ACROSS * 32 + lane) * N;
  const index_t left = blockIdx.x % across * (ACROSS * 32 * N), column = left + mine;
  const index_t chunk = blockIdx.x / across, start = chunk * each + group;
  const index_t stop = min(chunk * each + each, rows);
  float total[N] = {};
  if (column < columns && start < stop) {
    const int count = (int)((stop - start + GROUPS - 1) / GROUPS);
    const index_t step = GROUPS * columns;
    index_t at = start * columns + column;
    typename A::W xs[AHEAD], gs[AHEAD];
    float b[N];
    A::unpack(__ldg(reinterpret_cast<const typename A::W*>(bias + column)), b);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
      if (u < count) xs[u] = A::load(x + at + u * step), gs[u] = A::load(grad + at + u * step);
#pragma unroll 1
    for (int row = 0; row < count; row += AHEAD) {
#pragma unroll
      for (int u = 0; u < AHEAD; ++u, at += step) {
        if (row + u >= count) break;
        float v[N], d[N];
        A::unpack(xs[u], v);
        A::unpack(gs[u], d);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          d[j] *= slope(v[j] + b[j]);
          // The unrounded gradient is summed: dbias does not inherit the rounding of dx.
          total[j] += d[j];
        }
        A::store(dx + at, A::pack(d));
        if (row + u + AHEAD < count) {
          xs[u] = A::load(x + at + AHEAD * step);
          gs[u] = A::load(grad + at + AHEAD * step);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sums[group][j * 32 * ACROSS + mine / N] = total[j];
  __syncthreads();
  for (int i = threadIdx.x; i < ACROSS * 32 * N; i += BACK_THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) sum += sums[g][i % N * 32 * ACROSS + i / N];
    if (left + i < columns) partial[chunk * columns + left + i] = sum;
  }
}

// grad, x, dx: (rows, columns) contiguous; bias: (columns,); partial: (chunks, columns) float. A chunk has
// `each` rows, and `across` adjacent blocks cover its columns.
extern "C" __global__ void __launch_bounds__(BACK_THREADS, BLOCKS)
bias_gelu_backward_wide(const WEFT_T* grad, const WEFT_T* x, const WEFT_T* bias, WEFT_T* dx,
                        float* partial, index_t rows, index_t columns, index_t each,
                        index_t across) {
  backward<Wide<WEFT_T>::N>(grad, x, bias, dx, partial, rows, columns, each, across);
}

extern "C" __global__ void __launch_bounds__(BACK_THREADS)
bias_gelu_backward_any(const WEFT_T* grad, const WEFT_T* x, const WEFT_T* bias, WEFT_T* dx,
                       float* partial, index_t rows, index_t columns, index_t each,
                       index_t across) {
  backward<1>(grad, x, bias, dx, partial, rows, columns, each, across);
}

// partial: (chunks, columns); dbias: (columns,). A block of 1024 threads has 32 columns. A warp adds every
// 32nd chunk, with eight loads in flight; the warps' sums are then added in the order of the warps.
extern "C" __global__ void __launch_bounds__(1024)
bias_gelu_sum_partials(const float* partial, WEFT_T* dbias, index_t chunks, index_t columns) {
  constexpr int FLIGHT = 8;
  // 33 instead of 32 words in a row: the transposed writes of a warp would all hit one bank.
  __shared__ float sums[32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t column = (index_t)blockIdx.x * 32 + lane;
  float sum = 0.0f;
  wait_for_previous_kernel();
  if (column < columns) {
    for (index_t c = warp; c < chunks; c += 32 * FLIGHT) {
      float in[FLIGHT];
#pragma unroll
      for (int u = 0; u < FLIGHT; ++u)
        in[u] = c + u * 32 < chunks ? __ldcg(partial + (c + u * 32) * columns + column) : 0.0f;
#pragma unroll
      for (int u = 0; u < FLIGHT; ++u) sum += in[u];
    }
  }
  sums[lane][warp] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < 32; ++w) sum += sums[lane][w];
  dbias[column] = from_float<WEFT_T>(sum);
}
