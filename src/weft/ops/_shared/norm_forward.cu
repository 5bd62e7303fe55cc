// Norms forward, y = (x - mean) rstd w + b or x rstd w, a block a row.
//
// norm_block: the row waits in registers, VECTORS accesses a thread, all loaded before the first is
// used; read once. norm_long: any length, read from L2 again for the variance and the answers.
// x, r: (rows, columns), strides apart; w, b: (columns,); y, s: (rows, columns) contiguous.
// Bytes: n read + n written; with ADD 2n + 2n.
#include "norm.cuh"

#ifndef VECTORS
#define VECTORS 4
#endif

__device__ __forceinline__ Pack normalised(const Pack& x, float mean, float more, float scale,
                                           const Weights& w, const WEFT_W* b, int at) {
  Pack y;
  Weights shift;
  if (CENTRED) shift = reinterpret_cast<const Weights*>(b)[at];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float hat = ((to_float(x.at[j]) - mean) - more) * scale;
    const float scaled = hat * to_float(w.at[j]);
    y.at[j] = from_float<WEFT_T>(CENTRED ? scaled + to_float(shift.at[j]) : scaled);
  }
  return y;
}

extern "C" __global__ void __launch_bounds__(THREADS)
norm_block(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
           const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
           WEFT_T* __restrict__ s, index_t columns, index_t x_stride, index_t r_stride,
           double eps) {
  __shared__ Sums<1> first[32];
  __shared__ Sums<2> second[32];
  const index_t row = blockIdx.x;
  const int accesses = columns / N;
  Pack in[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    in[i] = zeros();
    if (at < accesses) in[i] = reinterpret_cast<const Pack*>(x + row * x_stride)[at];
  }
  if (ADD) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      if (at >= accesses) continue;
      in[i] = added(in[i], reinterpret_cast<const Pack*>(r + row * r_stride)[at]);
      reinterpret_cast<Pack*>(s + row * columns)[at] = in[i];
    }
  }
  float mean = 0.0f, more = 0.0f, sum = 0.0f, squares = 0.0f;
  if (CENTRED) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) sum += to_float(in[i].at[j]);
    mean = block_sums<1>({sum}, first).at[0] / columns;
    sum = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (threadIdx.x + i * THREADS >= accesses) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float left = to_float(in[i].at[j]) - mean;
      sum += left;
      squares = fmaf(left, left, squares);
    }
  }
  const Sums<2> whole = block_sums<2>({sum, squares}, second);
  if (CENTRED) more = whole.at[0] / columns;
  const float scale =
      inverse_root(not_below_zero(whole.at[1] / columns - more * more) + (float)eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (at >= accesses) continue;
    const Weights scales = reinterpret_cast<const Weights*>(w)[at];
    reinterpret_cast<Pack*>(y + row * columns)[at] =
        normalised(in[i], mean, more, scale, scales, b, at);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
norm_long(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r, const WEFT_W* __restrict__ w,
          const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y, WEFT_T* s, index_t columns,
          index_t x_stride, index_t r_stride, double eps) {
  __shared__ Sums<1> first[32];
  __shared__ Sums<2> second[32];
  const index_t row = blockIdx.x;
  const int accesses = columns / N;
  const Pack* in = reinterpret_cast<const Pack*>(x + row * x_stride);
  float mean = 0.0f, more = 0.0f, sum = 0.0f, squares = 0.0f;
  if (ADD || CENTRED) {
#pragma unroll 4
    for (int at = threadIdx.x; at < accesses; at += THREADS) {
      Pack p = in[at];
      if (ADD) {
        p = added(p, reinterpret_cast<const Pack*>(r + row * r_stride)[at]);
        reinterpret_cast<Pack*>(s + row * columns)[at] = p;
      }
#pragma unroll
      for (int j = 0; j < N; ++j) sum += to_float(p.at[j]);
    }
    if (CENTRED) mean = block_sums<1>({sum}, first).at[0] / columns;
    sum = 0.0f;
    if (ADD) in = reinterpret_cast<const Pack*>(s + row * columns);  // what this thread has written
  }
#pragma unroll 4
  for (int at = threadIdx.x; at < accesses; at += THREADS) {
    const Pack p = in[at];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float left = to_float(p.at[j]) - mean;
      sum += left;
      squares = fmaf(left, left, squares);
    }
  }
  const Sums<2> whole = block_sums<2>({sum, squares}, second);
  if (CENTRED) more = whole.at[0] / columns;
  const float scale =
      inverse_root(not_below_zero(whole.at[1] / columns - more * more) + (float)eps);
#pragma unroll 2
  for (int at = threadIdx.x; at < accesses; at += THREADS) {
    const Weights scales = reinterpret_cast<const Weights*>(w)[at];
    reinterpret_cast<Pack*>(y + row * columns)[at] =
        normalised(in[at], mean, more, scale, scales, b, at);
  }
}
