// Norms backward for any row: dx by a block a row, then the weights' gradients by columns.
//
// g, x and (ADD) more, the gradient of s: (rows, columns), strides apart; dx, dr: contiguous; held:
// (rows, 3), the row's mean, what the mean was off by, and 1 / deviation; part: (2 or 1, parts,
// columns) float32, sums of g xhat and of g. Bytes: norm_rows 2n from memory, again from L2, and n
// written; norm_columns 2n read.
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
norm_rows(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ more_,
          const WEFT_T* __restrict__ x, const WEFT_W* __restrict__ w, WEFT_T* __restrict__ dx,
          WEFT_T* __restrict__ dr, float* __restrict__ held, index_t columns, index_t g_stride,
          index_t more_stride, index_t x_stride, double eps) {
  __shared__ Sums<2> first[32];
  __shared__ Sums<3> second[32];
  const index_t row = blockIdx.x;
  const int accesses = columns / N;
  const Pack* in = reinterpret_cast<const Pack*>(x + row * x_stride);
  const Pack* grad = reinterpret_cast<const Pack*>(g + row * g_stride);
  const Weights* weights = reinterpret_cast<const Weights*>(w);
  float mean = 0.0f, average = 0.0f;
  if (CENTRED) {
    Sums<2> mine = {};
    for (int at = threadIdx.x; at < accesses; at += THREADS) {
      const Pack p = in[at], q = grad[at];
      const Weights v = weights[at];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        mine.at[0] += to_float(p.at[j]);
        mine.at[1] = fmaf(to_float(q.at[j]), to_float(v.at[j]), mine.at[1]);
      }
    }
    mine = block_sums<2>(mine, first);
    mean = mine.at[0] / columns;
    average = mine.at[1] / columns;
  }
  Sums<3> mine = {};
  for (int at = threadIdx.x; at < accesses; at += THREADS) {
    const Pack p = in[at], q = grad[at];
    const Weights v = weights[at];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float left = to_float(p.at[j]) - mean;
      mine.at[0] += left;
      mine.at[1] = fmaf(left, left, mine.at[1]);
      mine.at[2] = fmaf(to_float(q.at[j]) * to_float(v.at[j]), left, mine.at[2]);
    }
  }
  mine = block_sums<3>(mine, second);
  const float more = CENTRED ? mine.at[0] / columns : 0.0f;
  const float scale =
      inverse_root(not_below_zero(mine.at[1] / columns - more * more) + (float)eps);
  const float dot = (mine.at[2] / columns - more * average) * scale;
  if (threadIdx.x == 0) {
    held[3 * row] = mean;
    held[3 * row + 1] = more;
    held[3 * row + 2] = scale;
  }
#pragma unroll 1
  for (int at = threadIdx.x; at < accesses; at += THREADS) {
    const Pack p = in[at], q = grad[at];
    const Weights v = weights[at];
    Pack extra = zeros(), out;
    if (ADD) extra = reinterpret_cast<const Pack*>(more_ + row * more_stride)[at];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float hat = ((to_float(p.at[j]) - mean) - more) * scale;
      float d = (to_float(q.at[j]) * to_float(v.at[j]) - average - hat * dot) * scale;
      if (ADD) d += to_float(extra.at[j]);
      out.at[j] = from_float<WEFT_T>(d);
    }
    reinterpret_cast<Pack*>(dx + row * columns)[at] = out;
    if (ADD) reinterpret_cast<Pack*>(dr + row * columns)[at] = out;
  }
}

// Block (c, p): a column a thread, every parts-th row.
extern "C" __global__ void __launch_bounds__(THREADS)
norm_columns(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ x,
             const float* __restrict__ held, float* __restrict__ part, index_t rows,
             index_t columns, index_t g_stride, index_t x_stride) {
  const index_t column = (index_t)blockIdx.x * THREADS + threadIdx.x;
  if (column >= columns) return;
  float dw = 0.0f, db = 0.0f;
#pragma unroll 8
  for (index_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const float grad = to_float(g[row * g_stride + column]);
    const float left = (to_float(x[row * x_stride + column]) - held[3 * row]) - held[3 * row + 1];
    dw = fmaf(grad, left * held[3 * row + 2], dw);
    db += grad;
  }
  part[blockIdx.y * columns + column] = dw;
  if (CENTRED) part[(gridDim.y + blockIdx.y) * columns + column] = db;
}

#ifndef SUMMING
#define SUMMING 512
#endif

// Block (c, which): 32 columns of part[which]: (parts, columns), added up in a fixed order. A warp
// has every 16th row, twelve at once: of a part a multiprocessor all loads are under way.
extern "C" __global__ void __launch_bounds__(SUMMING)
norm_sum(const float* __restrict__ part, WEFT_W* __restrict__ dw, WEFT_W* __restrict__ db,
         index_t parts, index_t columns) {
  constexpr int GROUPS = SUMMING / 32, BATCH = 12;
  __shared__ float sums[GROUPS][32];
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const index_t column = (index_t)blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < columns) {
    const float* from = part + blockIdx.y * parts * columns + column;
    for (int row = group; row < parts; row += BATCH * GROUPS) {
      float some[BATCH];
#pragma unroll
      for (int k = 0; k < BATCH; ++k)
        some[k] = row + k * GROUPS < parts ? from[(row + k * GROUPS) * columns] : 0.0f;
#pragma unroll
      for (int k = 0; k < BATCH; ++k) sum += some[k];
    }
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group || column >= columns) return;
#pragma unroll
  for (int k = 1; k < GROUPS; ++k) sum += sums[k][lane];
  (blockIdx.y ? db : dw)[column] = from_float<WEFT_W>(sum);
}
