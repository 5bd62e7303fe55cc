// What the linear operators do around cuBLAS's products: an epilogue, and the pass of a backward.
//
// A thread holds N elements side by side, 16 bytes where the rows allow it (WIDE), else one, and
// walks down rows with UNROLL of them in flight; a block covers THREADS * N columns of its rows.
// WAY: 1 makes GELU (tanh form) of what is there, 2 adds a residual; 0 has no epilogue of ours.
// Bytes of the epilogue: p read (M N, and the residual, M N), y written (M N).
#include "numeric.cuh"

#ifndef WAY
#define WAY 1
#define WIDE 1
#endif

using T = WEFT_T;
constexpr int N = WIDE ? Wide<T>::N : 1;
constexpr int THREADS = 128, UNROLL = 4;
constexpr int LANES = 32, GROUPS = THREADS / LANES;  // of the column pass
using Pack = Vector<T, N>;

namespace {

constexpr float ROOT = 0.7978845608028654f, CUBIC = 0.044715f;

// exp(-2u), u = ROOT (v + CUBIC v^3): exp2 from the special-function unit, 2 ulp.
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
  // 1 - s loses its digits where s nears 1; there e s has them all.
  const float rest = s < 0.5f ? 1.0f - s : e * s;
  // v^2 is held finite so that 0 * inf makes no NaN of a slope that is plainly 0 or 1.
  const float inner = 2.0f * ROOT * fmaf(3.0f * CUBIC, fminf(v * v, 1e30f), 1.0f);
  return s + v * s * rest * inner;
}

// One access of 16 bytes: assigned as a vector, it is stored in words.
__device__ __forceinline__ void put(T* to, const Pack& v) {
  if constexpr (WIDE) {
    unsigned w[4];
    memcpy(w, &v, 16);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
  } else {
    *to = v.at[0];
  }
}

}  // namespace

#if WAY != 0
// p, y: (M, N columns) contiguous, and one memory where the caller wants it so; by: the residual,
// (M, N), or nothing. A block: UNROLL rows of THREADS * N columns.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_epilogue(const T* p, const T* by, T* y, index_t m, index_t n, index_t across) {
  const index_t column = ((index_t)blockIdx.x % across * THREADS + threadIdx.x) * N;
  const index_t first = (index_t)blockIdx.x / across * UNROLL;
  if (column >= n) return;
  Pack in[UNROLL], more[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
    if (first + i < m) {
      const index_t at = (first + i) * n + column;
      in[i] = *reinterpret_cast<const Pack*>(p + at);
      if constexpr (WAY == 2) more[i] = *reinterpret_cast<const Pack*>(by + at);
    }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (first + i >= m) break;
    Pack out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float v = to_float(in[i].at[j]);
      if constexpr (WAY == 1) out.at[j] = from_float<T>(gelu(v));
      if constexpr (WAY == 2) out.at[j] = from_float<T>(v + to_float(more[i].at[j]));
    }
    put(y + (first + i) * n + column, out);
  }
}
#endif

// grad, pre, out: (M, N columns) contiguous; partial: (chunks, N columns). A block sums LANES * N
// columns over its chunk of `each` rows, a warp every GROUPS-th of them, always in the same order.
// On the way: WAY 0 writes nothing, 1 writes out = grad * gelu'(pre), which is what is summed, and
// 2 a copy of grad. Every element read once, written once.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_columns(const T* grad, const T* pre, T* out, float* partial, index_t m, index_t n,
               index_t each, index_t across) {
  __shared__ float sums[GROUPS][LANES * N + 1];
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const index_t column = ((index_t)blockIdx.x % across * LANES + lane) * N;
  const index_t chunk = (index_t)blockIdx.x / across;
  const index_t last = min(m, (chunk + 1) * each);
  float total[N] = {};
  if (column < n) {
    for (index_t row = chunk * each + group; row < last; row += GROUPS * UNROLL) {
      Pack g[UNROLL], v[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        if (row + i * GROUPS < last) {
          const index_t at = (row + i * GROUPS) * n + column;
          g[i] = *reinterpret_cast<const Pack*>(grad + at);
          if constexpr (WAY == 1) v[i] = *reinterpret_cast<const Pack*>(pre + at);
        }
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        if (row + i * GROUPS >= last) break;
        const index_t at = (row + i * GROUPS) * n + column;
        if constexpr (WAY == 2) put(out + at, g[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          float d = to_float(g[i].at[j]);
          if constexpr (WAY == 1) {
            d *= gelu_slope(to_float(v[i].at[j]));
            g[i].at[j] = from_float<T>(d);
          }
          total[j] += d;
        }
        if constexpr (WAY == 1) put(out + at, g[i]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sums[group][lane * N + j] = total[j];
  __syncthreads();
  const index_t base = (index_t)blockIdx.x % across * LANES * N;
  for (int c = threadIdx.x; c < LANES * N; c += THREADS) {
    float all = 0.f;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) all += sums[i][c];
    if (base + c < n) partial[chunk * n + base + c] = all;
  }
}

// partial: (chunks, N columns); out: (N columns,). A block takes LANES columns, a warp every
// GROUPS-th chunk of them, in a fixed order.
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
    float all = 0.f;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) all += sums[i][lane];
    out[column] = from_float<T>(all);
  }
}
