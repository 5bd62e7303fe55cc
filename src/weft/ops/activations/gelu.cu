// GELU (tanh form), forward and backward, elementwise over n elements in storage order.
//
// Each thread moves UNROLL 16-byte vectors, all loaded before the first is used: a warp has
// UNROLL * 512 bytes in flight. Bytes: n read + n written (backward: 2n read + n written).
#include "numeric.cuh"

#ifndef UNROLL
#define UNROLL 4
#endif
#ifndef THREADS
#define THREADS 256
#endif

constexpr int N = Wide<WEFT_T>::N;
using Pack = Vector<WEFT_T, N>;

// Return exp(-2u), from which sigmoid(2u) = 1 / (1 + exp(-2u)) follows. exp2 and the reciprocal come from the
// special function unit, with an error of at most 2 ulp each. For x far below 0 exp is inf, and x * (1/inf) =
// 0.
__device__ __forceinline__ float exp_minus_2u(float x) {
  float u = 0.7978845608028654f * x * fmaf(0.044715f, x * x, 1.0f), e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-2.885390081777927f * u));
  return e;
}

__device__ __forceinline__ float sigmoid(float e) {
  float s;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
  return s;
}

__device__ __forceinline__ float value(float x) { return x * sigmoid(exp_minus_2u(x)); }

__device__ __forceinline__ float slope(float x) {
  float e = exp_minus_2u(x), s = sigmoid(e);
  // 1 - s loses its digits where s is near 1; e s is the same value and keeps them.
  float rest = s < 0.5f ? 1.0f - s : e * s;
  // x^2 is clamped to a finite value: 0 * inf would turn a slope of exactly 0 or 1 into NaN.
  float inner = 0.7978845608028654f * fmaf(0.134145f, fminf(x * x, 1e30f), 1.0f);
  return s + x * s * rest * 2.0f * inner;
}

// x, y: (n,), both 16-byte aligned. A block covers THREADS * UNROLL vectors. The last n % N elements do not
// fill a vector: the first threads of the last block take one each.
extern "C" __global__ void __launch_bounds__(THREADS)
gelu_forward_wide(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t n) {
  const index_t vectors = n / N;
  const index_t first = (index_t)blockIdx.x * THREADS * UNROLL + threadIdx.x;
  Pack in[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
    if (first + i * THREADS < vectors)
      in[i] = reinterpret_cast<const Pack*>(x)[first + i * THREADS];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (first + i * THREADS >= vectors) continue;
    Pack out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.at[j] = from_float<WEFT_T>(value(to_float(in[i].at[j])));
    reinterpret_cast<Pack*>(y)[first + i * THREADS] = out;
  }
  const index_t tail = vectors * N + threadIdx.x;
  if (blockIdx.x == gridDim.x - 1 && tail < n) {
    y[tail] = from_float<WEFT_T>(value(to_float(x[tail])));
  }
}

// grad, x, dx: (n,), all 16-byte aligned; vectors are distributed as in the forward.
extern "C" __global__ void __launch_bounds__(THREADS)
gelu_backward_wide(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ x,
                   WEFT_T* __restrict__ dx, index_t n) {
  const index_t vectors = n / N;
  const index_t first = (index_t)blockIdx.x * THREADS * UNROLL + threadIdx.x;
  Pack in[UNROLL], gradient[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
    if (first + i * THREADS < vectors) {
      in[i] = reinterpret_cast<const Pack*>(x)[first + i * THREADS];
      gradient[i] = reinterpret_cast<const Pack*>(grad)[first + i * THREADS];
    }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (first + i * THREADS >= vectors) continue;
    Pack out;
#pragma unroll
    for (int j = 0; j < N; ++j)
      out.at[j] = from_float<WEFT_T>(to_float(gradient[i].at[j]) * slope(to_float(in[i].at[j])));
    reinterpret_cast<Pack*>(dx)[first + i * THREADS] = out;
  }
  const index_t tail = vectors * N + threadIdx.x;
  if (blockIdx.x == gridDim.x - 1 && tail < n)
    dx[tail] = from_float<WEFT_T>(to_float(grad[tail]) * slope(to_float(x[tail])));
}

// For pointers that are not 16-byte aligned: one element a thread, any alignment.
extern "C" __global__ void gelu_forward_any(const WEFT_T* x, WEFT_T* y, index_t n) {
  const index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_float<WEFT_T>(value(to_float(x[i])));
}

extern "C" __global__ void gelu_backward_any(const WEFT_T* grad, const WEFT_T* x, WEFT_T* dx,
                                             index_t n) {
  const index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) dx[i] = from_float<WEFT_T>(to_float(grad[i]) * slope(to_float(x[i])));
}
