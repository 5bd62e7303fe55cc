// Norms forward, y = (x - mean) rstd w + b or x rstd w, by blocks that come and go.
//
// norm_block: a block, or with CLUSTER above 1 so many, has ROWS rows in registers, VECTORS
// accesses a thread of each, all loaded before the first is used; read once, one barrier for all of
// them. Several rows share what is read of the weights: past 16384 columns they come from L2, and
// are as many bytes as the row, or twice. EARLY asks for them with the rows. Blocks of a cluster
// write their sums into each other's shared memory, for which all must have begun. norm_long: any
// length, read from L2 again for the variance and the answers.
// x, r: (rows, columns), strides apart; w, b: (columns,); y, s: (rows, columns) contiguous.
// Bytes: n read + n written; with ADD 2n + 2n. With DROP, norm_block's x is dropped out first.
#include "norm_answer.cuh"
#include "norm_dropped.cuh"

#ifndef EARLY
#define EARLY 0
#endif
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS)
norm_block(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
           const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
           WEFT_T* __restrict__ s, index_t rows, index_t columns, index_t x_stride,
           index_t r_stride, double eps AND_DROPOUT) {
  __shared__ float table[ROWS][ENTRIES * FIELDS];
#if CLUSTER > 1
  cluster_arrive();
#endif
  const Slice slice(columns);
  const index_t from = (index_t)slice.begin * N, top = blockIdx.x / CLUSTER * (index_t)ROWS;
  Pack in[ROWS][VECTORS], more[ROWS][ADD ? VECTORS : 1];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const index_t row = ROWS == 1 ? top : min(top + k, rows - 1);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      in[k][i] = zeros();
      if (!FULL && at >= slice.count) continue;
      in[k][i] = loaded(reinterpret_cast<const Pack*>(x + row * x_stride + from) + at);
      if (ADD) more[k][ADD ? i : 0] =
          loaded(reinterpret_cast<const Pack*>(r + row * r_stride + from) + at);
    }
  }
  Scales scales;
  if (EARLY) scales.load(w + from, b + from, threadIdx.x, slice.count);
  float ref[ROWS], one[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    if (ADD) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const int at = threadIdx.x + i * THREADS;
        if (!FULL && at >= slice.count) continue;
        const index_t first = (top + k) * columns + from;
        in[k][i] = added(in[k][i], more[k][ADD ? i : 0], DROPOUT, first + at * N);
        if (k && top + k >= rows) continue;
        reinterpret_cast<Pack*>(s + first)[at] = in[k][i];
      }
    }
    ref[k] = reference(in[k], slice.count);
    const Parts sums = sums_of(in[k], ref[k], threadIdx.x, slice.count);
#if CLUSTER > 1
    if (k == 0) cluster_wait();
#endif
    one[k] = put(sums, ref[k], table[k]);
  }
  all_meet();
  const Counts counts = counts_of(slice.all, slice.each);
  const float share = __frcp_rn((float)columns);
  Whole whole[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k)
    whole[k] = merged(one[k], ref[k], table[k], counts, share, (float)eps);
  write_rows<!EARLY>(in, ref, whole, scales, w + from, b + from, y + top * columns + from, columns,
                     rows - top, slice.count);
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
    const Pack p = in[at];
    Weights shifts;
    if (CENTRED) shifts = reinterpret_cast<const Weights*>(b)[at];
    Pack out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float scaled = ((to_float(p.at[j]) - mean) - more) * scale * to_float(scales.at[j]);
      out.at[j] = from_float<WEFT_T>(CENTRED ? scaled + to_float(shifts.at[j]) : scaled);
    }
    reinterpret_cast<Pack*>(y + row * columns)[at] = out;
  }
}
