// Norms forward, y = (x - mean) rstd w + b or x rstd w, a block a row.
//
// norm_block: the row waits in registers, VECTORS accesses a thread, all loaded before the first is
// used; read once, one barrier. EARLY asks for the weights with it. norm_long: any length, read
// from L2 again for the variance and the answers.
// x, r: (rows, columns), strides apart; w, b: (columns,); y, s: (rows, columns) contiguous.
// Bytes: n read + n written; with ADD 2n + 2n.
#define FORGET 1
#include "norm_answer.cuh"

#ifndef EARLY
#define EARLY 0
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
norm_block(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
           const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
           WEFT_T* __restrict__ s, index_t columns, index_t x_stride, index_t r_stride,
           double eps) {
  __shared__ float table[ENTRIES * FIELDS];
  const index_t row = blockIdx.x;
  const int accesses = columns / N;
  Pack in[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    in[i] = zeros();
    if (FULL || at < accesses) in[i] = reinterpret_cast<const Pack*>(x + row * x_stride)[at];
  }
  Scales scales;
  if (EARLY) scales.load(w, b, threadIdx.x, accesses);
  if (ADD) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      if (!FULL && at >= accesses) continue;
      in[i] = added(in[i], reinterpret_cast<const Pack*>(r + row * r_stride)[at]);
      reinterpret_cast<Pack*>(s + row * columns)[at] = in[i];
    }
  }
  const float ref = reference(in[0]);
  const float one = exchange(sums_of(in, ref, threadIdx.x, accesses), ref, table);
  const Whole whole = merged(one, ref, table, counts_of(accesses, accesses),
                             __frcp_rn((float)columns), (float)eps);
  write_row<!EARLY>(in, ref, whole, scales, w, b, y + row * columns, threadIdx.x, accesses);
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
