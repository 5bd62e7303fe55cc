// Softmax by rows held in registers: each element is read once and written once.
//
// One strategy a program, by the macro that is defined, and one direction (BACKWARD):
//   LANES    softmax_warp: so many lanes of a warp hold a row, no barrier
//   without  softmax_block: a block of THREADS holds a row, one barrier
// Every thread holds VECTORS accesses, all loaded before the first is used. Columns, row strides
// and pointers are whole numbers of accesses. Bytes: n read + n written (backward: 2n read + n
// written).
#include "softmax.cuh"

#ifndef VECTORS
#define VECTORS 4
#endif

// The exponentials of a short row are kept; those of a long one are taken again from the row as it
// was read, which is half as many registers in 16-bit types.
constexpr bool KEEP = VECTORS * N <= 32;

// VECTORS accesses of one row, every STEP-th from `first`; past the row's end -inf or 0.
template <int STEP>
__device__ __forceinline__ void load_row(Pack (&in)[VECTORS], const WEFT_T* row, int first,
                                         int accesses, float past) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    in[i] = filled(past);
    if (first + i * STEP < accesses)
      in[i] = reinterpret_cast<const Pack*>(row)[first + i * STEP];
  }
}

template <int STEP>
__device__ __forceinline__ void store_row(WEFT_T* row, const Pack& out, int i, int first,
                                          int accesses) {
  if (first + i * STEP < accesses) reinterpret_cast<Pack*>(row)[first + i * STEP] = out;
}

// This thread's exponentials against `top`: their sum, and where there is room each of them.
__device__ __forceinline__ float exponentials(Pack (&in)[VECTORS], float top,
                                              float (&e)[KEEP ? VECTORS * N : 1]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (!KEEP) forget(in[i]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float v = exp_of_difference(element(in[i], j), top);
      if (KEEP) e[KEEP ? i * N + j : 0] = v;
      sum += v;
    }
  }
  return sum;
}

// Softmax of one row from the registers that hold it. Kept exponentials stand against `mine`, this
// warp's own maximum, and are brought to the row's by one factor.
template <int STEP>
__device__ __forceinline__ void write_row(WEFT_T* row, Pack (&in)[VECTORS],
                                          const float (&e)[KEEP ? VECTORS * N : 1], float mine,
                                          Statistics whole, int first, int accesses) {
  float scale = __frcp_rn(whole.total);
  if (KEEP) scale *= exp_of_difference(mine, whole.top);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (!KEEP) forget(in[i]);
    const Pack out = packed([&](int j) {
      const float v = KEEP ? e[KEEP ? i * N + j : 0]
                           : exp_of_difference(element(in[i], j), whole.top);
      return v * scale;
    });
    store_row<STEP>(row, out, i, first, accesses);
  }
}

__device__ __forceinline__ float row_max(const Pack (&in)[VECTORS]) {
  float top = LEAST;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) top = fmaxf(top, pack_max(in[i]));
  return top;
}

#ifndef BACKWARD
#ifdef LANES

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. A warp goes on while
// any of its rows is there, so that all its lanes meet in every shuffle.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_warp(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t rows, index_t columns,
             index_t stride) {
  const int first = threadIdx.x % LANES, accesses = columns / N;
  const index_t step = (index_t)gridDim.x * (THREADS / LANES);
  const int within = threadIdx.x % 32 / LANES;
  index_t row = (index_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  for (; row - within < rows; row += step) {
    Pack in[VECTORS];
    load_row<LANES>(in, x + row * stride, first, row < rows ? accesses : 0, minus_infinity());
    float e[KEEP ? VECTORS * N : 1];
    const float top = warp_max<LANES>(row_max(in));
    const float total = warp_sum<LANES>(exponentials(in, top, e));
    write_row<LANES>(y + row * columns, in, e, top, {top, total}, first, row < rows ? accesses : 0);
  }
}

#else

// One block a row. Each warp takes its exponentials against its own maximum, so that one barrier is
// enough for maximum and sum together.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_block(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t columns,
              index_t stride) {
  __shared__ Statistics scratch[32];
  const int first = threadIdx.x, accesses = columns / N;
  Pack in[VECTORS];
  load_row<THREADS>(in, x + blockIdx.x * stride, first, accesses, minus_infinity());
  float e[KEEP ? VECTORS * N : 1];
  const float mine = warp_max(row_max(in));
  const float sum = warp_sum(exponentials(in, mine, e));
  const Statistics whole = block_merge({mine, sum}, scratch);
  write_row<THREADS>(y + blockIdx.x * columns, in, e, mine, whole, first, accesses);
}

#endif
#else

// One row's gradient, dx = y (g - dot), from the registers that hold g and y.
template <int STEP>
__device__ __forceinline__ void write_gradient(WEFT_T* row, Pack (&g)[VECTORS],
                                               Pack (&y)[VECTORS], float dot, int first,
                                               int accesses) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    forget(g[i]);
    forget(y[i]);
    const Pack out = packed([&](int j) { return element(y[i], j) * (element(g[i], j) - dot); });
    store_row<STEP>(row, out, i, first, accesses);
  }
}

__device__ __forceinline__ float row_dot(const Pack (&g)[VECTORS], const Pack (&y)[VECTORS]) {
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) dot += pack_dot(g[i], y[i]);
  return dot;
}

#ifdef LANES

// grad: (rows, columns), rows `stride` apart; y, dx: (rows, columns) contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_warp(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                      WEFT_T* __restrict__ dx, index_t rows, index_t columns, index_t stride) {
  const int first = threadIdx.x % LANES;
  const index_t step = (index_t)gridDim.x * (THREADS / LANES);
  const int within = threadIdx.x % 32 / LANES;
  index_t row = (index_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  for (; row - within < rows; row += step) {
    const int accesses = row < rows ? columns / N : 0;
    Pack g[VECTORS], out[VECTORS];
    load_row<LANES>(g, grad + row * stride, first, accesses, 0.0f);
    load_row<LANES>(out, y + row * columns, first, accesses, 0.0f);
    const float dot = warp_sum<LANES>(row_dot(g, out));
    write_gradient<LANES>(dx + row * columns, g, out, dot, first, accesses);
  }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_block(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                       WEFT_T* __restrict__ dx, index_t columns, index_t stride) {
  __shared__ float scratch[32];
  const int first = threadIdx.x, accesses = columns / N;
  Pack g[VECTORS], out[VECTORS];
  load_row<THREADS>(g, grad + blockIdx.x * stride, first, accesses, 0.0f);
  load_row<THREADS>(out, y + blockIdx.x * columns, first, accesses, 0.0f);
  const float dot = block_sum(row_dot(g, out), scratch);
  write_gradient<THREADS>(dx + blockIdx.x * columns, g, out, dot, first, accesses);
}

#endif
#endif
