// Norms backward for rows of any length and alignment: dx by one block a row, then the gradients of
// weight and bias by columns.
//
// g, x and (RESIDUAL) grad_s, the gradient of s: (rows, columns), with row strides; dx, dr:
// contiguous; statistics: (rows, 3), the row's mean, the mean's rounding error and 1 / deviation;
// partials: (2 or 1, parts, columns) float32, sums of g xhat and of g. Bytes: norm_backward_rows 2n
// from memory, again from L2, and n written; norm_backward_columns 2n read.
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
norm_backward_rows(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ grad_s,
                   const WEFT_T* __restrict__ x, const WEFT_W* __restrict__ w,
                   WEFT_T* __restrict__ dx, WEFT_T* __restrict__ dr,
                   float* __restrict__ statistics, index_t columns, index_t g_stride,
                   index_t grad_s_stride, index_t x_stride, double eps) {
  __shared__ Sums<2> first[32];
  __shared__ Sums<3> second[32];
  const index_t row = blockIdx.x;
  const int vectors = columns / N;
  const Pack* in = reinterpret_cast<const Pack*>(x + row * x_stride);
  const Pack* grad = reinterpret_cast<const Pack*>(g + row * g_stride);
  const Weights* weights = reinterpret_cast<const Weights*>(w);
  // First pass, for layer norm only: the means of x and of g w.
  float mean = 0.0f, mean_gw = 0.0f;
  if (CENTRED) {
    Sums<2> sums = {};
    for (int at = threadIdx.x; at < vectors; at += THREADS) {
      const Pack p = in[at], q = grad[at];
      const Weights v = weights[at];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sums.at[0] += to_float(p.at[j]);
        sums.at[1] = fmaf(to_float(q.at[j]), to_float(v.at[j]), sums.at[1]);
      }
    }
    sums = block_sums<2>(sums, first);
    mean = sums.at[0] / columns;
    mean_gw = sums.at[1] / columns;
  }
  // Second pass: sums about the mean, and the projection of g w on x - mean. Both read from the L2.
  Sums<3> sums = {};
  for (int at = threadIdx.x; at < vectors; at += THREADS) {
    const Pack p = in[at], q = grad[at];
    const Weights v = weights[at];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float diff = to_float(p.at[j]) - mean;
      sums.at[0] += diff;
      sums.at[1] = fmaf(diff, diff, sums.at[1]);
      sums.at[2] = fmaf(to_float(q.at[j]) * to_float(v.at[j]), diff, sums.at[2]);
    }
  }
  sums = block_sums<3>(sums, second);
  // The mean of x - mean is the rounding error of the mean (see norm_multi_pass in forward.cu).
  const float correction = CENTRED ? sums.at[0] / columns : 0.0f;
  const float rstd =
      inverse_root(not_below_zero(sums.at[1] / columns - correction * correction) + (float)eps);
  const float mean_gw_xhat = (sums.at[2] / columns - correction * mean_gw) * rstd;
  if (threadIdx.x == 0) {
    // Mean and correction stay apart: their sum in one float would lose the correction.
    statistics[3 * row] = mean;
    statistics[3 * row + 1] = correction;
    statistics[3 * row + 2] = rstd;
  }
#pragma unroll 1
  for (int at = threadIdx.x; at < vectors; at += THREADS) {
    const Pack p = in[at], q = grad[at];
    const Weights v = weights[at];
    Pack extra = zeros(), out;
    if (RESIDUAL) extra = reinterpret_cast<const Pack*>(grad_s + row * grad_s_stride)[at];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float xhat = ((to_float(p.at[j]) - mean) - correction) * rstd;
      float d = (to_float(q.at[j]) * to_float(v.at[j]) - mean_gw - xhat * mean_gw_xhat) * rstd;
      if (RESIDUAL) d += to_float(extra.at[j]);
      out.at[j] = from_float<WEFT_T>(d);
    }
    reinterpret_cast<Pack*>(dx + row * columns)[at] = out;
    if (RESIDUAL) reinterpret_cast<Pack*>(dr + row * columns)[at] = out;
  }
}

// Block (c, p): one column a thread, every parts-th row from row p on.
extern "C" __global__ void __launch_bounds__(THREADS)
norm_backward_columns(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ x,
                      const float* __restrict__ statistics, float* __restrict__ partials,
                      index_t rows, index_t columns, index_t g_stride, index_t x_stride) {
  const index_t column = (index_t)blockIdx.x * THREADS + threadIdx.x;
  if (column >= columns) return;
  // Neighbouring threads read neighbouring columns of one row: coalesced, at any alignment.
  float dw = 0.0f, db = 0.0f;
#pragma unroll 8
  for (index_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const float grad = to_float(g[row * g_stride + column]);
    const float diff =
        (to_float(x[row * x_stride + column]) - statistics[3 * row]) - statistics[3 * row + 1];
    dw = fmaf(grad, diff * statistics[3 * row + 2], dw);
    db += grad;
  }
  partials[blockIdx.y * columns + column] = dw;
  if (CENTRED) partials[(gridDim.y + blockIdx.y) * columns + column] = db;
}
