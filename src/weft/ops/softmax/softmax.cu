// Softmax with rows in registers: each element is read once and written once.
//
// The macros select one strategy and one direction (BACKWARD) for a program:
//   LANES defined  softmax_warp: LANES lanes of a warp have a row, no barrier
//   otherwise      softmax_block: a block of THREADS threads has a row, one barrier
// A thread loads all its VECS_PER_THREAD vectors before it uses the first. Columns, row strides and pointers
// are multiples of a vector. Bytes: n read + n written (backward: 2n read + n written).
#include "softmax.cuh"

#ifndef VECS_PER_THREAD
#define VECS_PER_THREAD 4
#endif

// A short part of a row keeps its exponentials as floats. A longer one computes them a second time from the
// packed elements, which take half as many registers in 16-bit types.
constexpr bool KEEP_EXPONENTIALS = VECS_PER_THREAD * N <= 32;
constexpr int EXPONENTIALS = KEEP_EXPONENTIALS ? VECS_PER_THREAD * N : 1;

// Loads VECS_PER_THREAD vectors of a row, every STEP-th from `first`; past the row's end they are `fill`, the
// identity of what follows: -inf for a maximum, 0 for a product.
template <int STEP>
__device__ __forceinline__ void load_row(Pack (&in)[VECS_PER_THREAD], const WEFT_T* row, int first,
                                         int vecs, float fill) {
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    // The fill lets the arithmetic run without a mask: only loads and stores are predicated.
    in[i] = filled_pack(fill);
    if (first + i * STEP < vecs)
      in[i] = reinterpret_cast<const Pack*>(row)[first + i * STEP];
  }
}

template <int STEP>
__device__ __forceinline__ void store_row(WEFT_T* row, const Pack& out, int i, int first,
                                          int vecs) {
  if (first + i * STEP < vecs) reinterpret_cast<Pack*>(row)[first + i * STEP] = out;
}

// Returns the sum of this thread's exp(x - top); stores each of them if KEEP_EXPONENTIALS.
__device__ __forceinline__ float exponentials(Pack (&in)[VECS_PER_THREAD], float top,
                                              float (&e)[EXPONENTIALS]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    if (!KEEP_EXPONENTIALS) discard_floats(in[i]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float v = exp_of_difference(element(in[i], j), top);
      if (KEEP_EXPONENTIALS) e[KEEP_EXPONENTIALS ? i * N + j : 0] = v;
      sum += v;
    }
  }
  return sum;
}

// Writes one row. Stored exponentials are relative to `own`, the maximum of this warp; one factor converts
// them to the maximum of the row.
template <int STEP>
__device__ __forceinline__ void write_row(WEFT_T* row, Pack (&in)[VECS_PER_THREAD],
                                          const float (&e)[EXPONENTIALS], float own,
                                          Statistics row_stats, int first, int vecs) {
  // One correctly rounded reciprocal for a row instead of a division for each element.
  float scale = __frcp_rn(row_stats.total);
  if (KEEP_EXPONENTIALS) scale *= exp_of_difference(own, row_stats.top);
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    if (!KEEP_EXPONENTIALS) discard_floats(in[i]);
    const Pack out = packed([&](int j) {
      const float v = KEEP_EXPONENTIALS ? e[KEEP_EXPONENTIALS ? i * N + j : 0]
                           : exp_of_difference(element(in[i], j), row_stats.top);
      return v * scale;
    });
    store_row<STEP>(row, out, i, first, vecs);
  }
}

__device__ __forceinline__ float row_max(const Pack (&in)[VECS_PER_THREAD]) {
  float top = LEAST;
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) top = fmaxf(top, pack_max(in[i]));
  return top;
}

#ifndef BACKWARD
#ifdef LANES

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. A warp continues while any of its
// rows exists, since every lane must take part in the shuffles; lanes without a row load no vector.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_warp(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t rows, index_t columns,
             index_t stride) {
  const int first = threadIdx.x % LANES, vecs = columns / N;
  const index_t step = (index_t)gridDim.x * (THREADS / LANES);
  // A warp has 32 / LANES rows; `row - within` is the first of them.
  const int within = threadIdx.x % 32 / LANES;
  index_t row = (index_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  for (; row - within < rows; row += step) {
    Pack in[VECS_PER_THREAD];
    load_row<LANES>(in, x + row * stride, first, row < rows ? vecs : 0, minus_infinity());
    float e[EXPONENTIALS];
    const float top = warp_max<LANES>(row_max(in));
    const float total = warp_sum<LANES>(exponentials(in, top, e));
    write_row<LANES>(y + row * columns, in, e, top, {top, total}, first, row < rows ? vecs : 0);
  }
}

#else

// One block a row. Each warp computes its exponentials relative to its own maximum, so that one barrier
// suffices for the maximum and the sum together.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_block(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t columns,
              index_t stride) {
  __shared__ Statistics scratch[32];
  const int first = threadIdx.x, vecs = columns / N;
  Pack in[VECS_PER_THREAD];
  load_row<THREADS>(in, x + blockIdx.x * stride, first, vecs, minus_infinity());
  float e[EXPONENTIALS];
  // No barrier before the exponentials: a block-wide maximum would cost one barrier more.
  const float own = warp_max(row_max(in));
  const float sum = warp_sum(exponentials(in, own, e));
  const Statistics row_stats = block_merge({own, sum}, scratch);
  write_row<THREADS>(y + blockIdx.x * columns, in, e, own, row_stats, first, vecs);
}

#endif
#else

// Writes one row of the gradient, dx = y (g - dot).
template <int STEP>
__device__ __forceinline__ void write_gradient(WEFT_T* row, Pack (&g)[VECS_PER_THREAD],
                                               Pack (&y)[VECS_PER_THREAD], float dot, int first,
                                               int vecs) {
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    discard_floats(g[i]);
    discard_floats(y[i]);
    const Pack out = packed([&](int j) { return element(y[i], j) * (element(g[i], j) - dot); });
    store_row<STEP>(row, out, i, first, vecs);
  }
}

__device__ __forceinline__ float row_dot(const Pack (&g)[VECS_PER_THREAD], const Pack (&y)[VECS_PER_THREAD]) {
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) dot += pack_dot(g[i], y[i]);
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
    const int vecs = row < rows ? columns / N : 0;
    Pack g[VECS_PER_THREAD], out[VECS_PER_THREAD];
    load_row<LANES>(g, grad + row * stride, first, vecs, 0.0f);
    load_row<LANES>(out, y + row * columns, first, vecs, 0.0f);
    const float dot = warp_sum<LANES>(row_dot(g, out));
    write_gradient<LANES>(dx + row * columns, g, out, dot, first, vecs);
  }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_block(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                       WEFT_T* __restrict__ dx, index_t columns, index_t stride) {
  __shared__ float scratch[32];
  const int first = threadIdx.x, vecs = columns / N;
  Pack g[VECS_PER_THREAD], out[VECS_PER_THREAD];
  load_row<THREADS>(g, grad + blockIdx.x * stride, first, vecs, 0.0f);
  load_row<THREADS>(out, y + blockIdx.x * columns, first, vecs, 0.0f);
  const float dot = block_sum(row_dot(g, out), scratch);
  write_gradient<THREADS>(dx + blockIdx.x * columns, g, out, dot, first, vecs);
}

#endif
#endif
