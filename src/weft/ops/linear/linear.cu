// Passes around cuBLAS's products in the linear family: an epilogue, and the column sums of a backward.
//
// A thread holds N adjacent elements, 16 bytes if the rows allow it (WIDE), else one element, and walks down
// rows with UNROLL of them in flight. A block of the epilogue covers THREADS * N columns of its rows.
// MODE 0: no epilogue of ours. MODE 1: GELU, tanh form. MODE 2: add a residual.
// Bytes of the epilogue: p read (M N, and the residual, M N), y written (M N).
#include "numeric.cuh"

#ifndef MODE
#define MODE 1
#define WIDE 1
#endif

using T = WEFT_T;
constexpr int N = WIDE ? Wide<T>::N : 1;
constexpr int THREADS = 128, UNROLL = 4;
constexpr int LANES = 32, GROUPS = THREADS / LANES;  // column sums: LANES vectors per warp, GROUPS warps
using Pack = Vector<T, N>;

namespace {

// ROOT is sqrt(2 / pi); -2.885390081777927 below is -2 log2(e).
constexpr float ROOT = 0.7978845608028654f, CUBIC = 0.044715f;

// exp(-2u) with u = ROOT (v + CUBIC v^3), by the special-function unit's exp2 (2 ulp).
__device__ __forceinline__ float exp_minus_2u(float v) {
  const float u = ROOT * v * fmaf(CUBIC, v * v, 1.0f);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-2.885390081777927f * u));
  return e;
}

__device__ __forceinline__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ float gelu(float v) { return v * reciprocal(1.0f + exp_minus_2u(v)); }

__device__ __forceinline__ float gelu_slope(float v) {
  const float e = exp_minus_2u(v), s = reciprocal(1.0f + e);
  // 1 - s loses its digits near s = 1. e s is the same value and keeps them.
  const float rest = s < 0.5f ? 1.0f - s : e * s;
  // v^2 is clamped: for large |v|, 0 * inf would turn a slope of exactly 0 or 1 into NaN.
  const float inner = 2.0f * ROOT * fmaf(3.0f * CUBIC, fminf(v * v, 1e30f), 1.0f);
  return s + v * s * rest * inner;
}

// One 16-byte store. A plain assignment of the struct compiles to four stores of a word.
__device__ __forceinline__ void store_vector(T* to, const Pack& v) {
  if constexpr (WIDE) {
    unsigned words[4];
    memcpy(words, &v, 16);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
  } else {
    *to = v.at[0];
  }
}

}  // namespace

#if MODE != 0
// p, y: (M, N columns) contiguous, and may be the same memory; residual: (M, N columns), or null. A block
// handles UNROLL rows of THREADS * N columns; `column_blocks` blocks cover a row.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_epilogue(const T* p, const T* residual, T* y, index_t m, index_t n, index_t column_blocks) {
  const index_t column = ((index_t)blockIdx.x % column_blocks * THREADS + threadIdx.x) * N;
  const index_t first = (index_t)blockIdx.x / column_blocks * UNROLL;
  if (column >= n) return;
  Pack in[UNROLL], r[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
    if (first + i < m) {
      // index_t has 64 bits: M N exceeds 2^31 in large products.
      const index_t at = (first + i) * n + column;
      in[i] = *reinterpret_cast<const Pack*>(p + at);
      if constexpr (MODE == 2) r[i] = *reinterpret_cast<const Pack*>(residual + at);
    }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (first + i >= m) break;
    Pack out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float v = to_float(in[i].at[j]);
      // In place (y is p) is safe: each thread has read its elements before it writes them.
      if constexpr (MODE == 1) out.at[j] = from_float<T>(gelu(v));
      if constexpr (MODE == 2) out.at[j] = from_float<T>(v + to_float(r[i].at[j]));
    }
    store_vector(y + (first + i) * n + column, out);
  }
}
#endif

// grad, pre, out: (M, N columns) contiguous; partial: (chunks, N columns). A block sums LANES * N columns
// over its chunk of `rows_per_chunk` rows, a warp every GROUPS-th of them, in a fixed order. On the way
// MODE 0 writes nothing, MODE 1 writes out = grad * gelu'(pre), which it sums instead of grad, before it is
// rounded, and MODE 2 writes a copy of grad. Each element is read once and written once.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_columns(const T* grad, const T* pre, T* out, float* partial, index_t m, index_t n,
               index_t rows_per_chunk, index_t column_blocks) {
  __shared__ float sums[GROUPS][LANES * N + 1];  // padded by one bank per warp's row
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const index_t column = ((index_t)blockIdx.x % column_blocks * LANES + lane) * N;
  const index_t chunk = (index_t)blockIdx.x / column_blocks;
  const index_t last = min(m, (chunk + 1) * rows_per_chunk);
  float total[N] = {};
  if (column < n) {
    // The host rounds rows_per_chunk to whole trips, so that only the last chunk has a ragged one.
    for (index_t row = chunk * rows_per_chunk + group; row < last; row += GROUPS * UNROLL) {
      // All loads of a trip are issued before the first is used.
      Pack g[UNROLL], v[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        if (row + i * GROUPS < last) {
          const index_t at = (row + i * GROUPS) * n + column;
          g[i] = *reinterpret_cast<const Pack*>(grad + at);
          if constexpr (MODE == 1) v[i] = *reinterpret_cast<const Pack*>(pre + at);
        }
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        if (row + i * GROUPS >= last) break;
        const index_t at = (row + i * GROUPS) * n + column;
        if constexpr (MODE == 2) store_vector(out + at, g[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          float d = to_float(g[i].at[j]);
          if constexpr (MODE == 1) {
            d *= gelu_slope(to_float(v[i].at[j]));
            g[i].at[j] = from_float<T>(d);
          }
          total[j] += d;
        }
        if constexpr (MODE == 1) store_vector(out + at, g[i]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sums[group][lane * N + j] = total[j];
  __syncthreads();
  // The warps' sums are added in the order of the warps: the result does not depend on which finishes first.
  const index_t base = (index_t)blockIdx.x % column_blocks * LANES * N;
  for (int c = threadIdx.x; c < LANES * N; c += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) sum += sums[i][c];
    if (base + c < n) partial[chunk * n + base + c] = sum;
  }
}

// partial: (chunks, N columns); out: (N columns,). A block adds LANES columns, a warp every GROUPS-th chunk
// of them, in a fixed order.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_sum_partials(const float* partial, T* out, index_t chunks, index_t n) {
  __shared__ float sums[GROUPS][LANES];
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const index_t column = (index_t)blockIdx.x * LANES + lane;
  float total = 0.f;
  if (column < n) {
#pragma unroll 8
    for (index_t chunk = group; chunk < chunks; chunk += GROUPS)
      total += partial[chunk * n + column];
  }
  sums[group][lane] = total;
  __syncthreads();
  if (group == 0 && column < n) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) sum += sums[i][lane];
    out[column] = from_float<T>(sum);
  }
}
