// Softmax with rows in registers: each element is read once and written once.
//
// The macros select one strategy and one direction (BACKWARD) for a program:
//   LANES defined  softmax_warp: LANES lanes of a warp have a row, no barrier
//   otherwise      softmax_block: a block of THREADS threads has a row, one barrier
// A thread loads all its VECS_PER_THREAD vectors before it uses the first. Rows may begin at any element: see
// PEEL in row_view.cuh. Bytes: n read + n written (backward: 2n read + n written).
#include "softmax.cuh"

#ifndef VECS_PER_THREAD
#define VECS_PER_THREAD 4
#endif

// A short part of a row keeps its exponentials as floats. A longer one computes them a second time from the
// packed elements, which take half as many registers in 16-bit types.
constexpr bool KEEP_EXPONENTIALS = VECS_PER_THREAD * N <= 32;
constexpr int EXPONENTIALS = KEEP_EXPONENTIALS ? VECS_PER_THREAD * N : 1;

// Loads VECS_PER_THREAD vectors of a row's body, every STEP-th from `first`; past its end they are `fill`,
// the identity of what follows: -inf for a maximum, 0 for a product.
template <int STEP>
__device__ __forceinline__ void load_row(Pack (&in)[VECS_PER_THREAD], const Body<Pack>& body, int first,
                                         int vecs, float fill) {
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    // The fill lets the arithmetic run without a mask: only loads and stores are predicated.
    in[i] = filled_pack(fill);
    if (first + i * STEP < vecs) in[i] = body[first + i * STEP];
  }
}

template <int STEP>
__device__ __forceinline__ void store_row(WEFT_T* body, const Pack& out, int i, int first,
                                          int vecs) {
  if (first + i * STEP < vecs) reinterpret_cast<Pack*>(body)[first + i * STEP] = out;
}

// Returns the sum of this thread's exp(x - top) in the body; stores each of them if KEEP_EXPONENTIALS.
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

// Writes one row's body. Stored exponentials are relative to `own`, the maximum of this warp; one factor
// converts them to the maximum of the row.
template <int STEP>
__device__ __forceinline__ void write_row(WEFT_T* body, Pack (&in)[VECS_PER_THREAD],
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
    store_row<STEP>(body, out, i, first, vecs);
  }
}

// The largest element, and the sum of exp(x - top), of this thread's edges.
template <int STEP> __device__ __forceinline__ float edges_max(const Edges<STEP>& edges, float top) {
#pragma unroll
  for (int k = 0; k < Edges<STEP>::COUNT; ++k) top = fmaxf(top, edges.at[k]);
  return top;
}
template <int STEP> __device__ __forceinline__ float edges_sum(const Edges<STEP>& edges, float top) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < Edges<STEP>::COUNT; ++k) sum += exp_of_difference(edges.at[k], top);
  return sum;
}

// Writes one row's edges, of which few threads have one: their exponentials are computed again.
template <int STEP>
__device__ __forceinline__ void write_edges(WEFT_T* row, const RowView& view, const Edges<STEP>& edges,
                                            Statistics row_stats, int first) {
  if (!PEEL) return;
  const float scale = __frcp_rn(row_stats.total);
  edges.store(row, view, first,
              [&](int k) { return exp_of_difference(edges.at[k], row_stats.top) * scale; });
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
  const int first = threadIdx.x % LANES;
  const index_t step = (index_t)gridDim.x * (THREADS / LANES);
  // A warp has 32 / LANES rows; `row - within` is the first of them.
  const int within = threadIdx.x % 32 / LANES;
  index_t row = (index_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  for (; row - within < rows; row += step) {
    WEFT_T* const out = y + row * columns;
    const RowView view(out, row < rows ? columns : 0);
    Pack in[VECS_PER_THREAD];
    Edges<LANES> edges;
    load_row<LANES>(in, Body<Pack>(x + row * stride + view.head), first, view.vecs, minus_infinity());
    edges.load(x + row * stride, view, first, minus_infinity());
    float e[EXPONENTIALS];
    const float top = warp_max<LANES>(edges_max(edges, row_max(in)));
    const float total = warp_sum<LANES>(exponentials(in, top, e) + edges_sum(edges, top));
    write_row<LANES>(out + view.head, in, e, top, {top, total}, first, view.vecs);
    write_edges(out, view, edges, {top, total}, first);
  }
}

#else

// One block a row. Each warp computes its exponentials relative to its own maximum, so that one barrier
// suffices for the maximum and the sum together.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_block(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t columns,
              index_t stride) {
  __shared__ Statistics scratch[32];
  const int first = threadIdx.x;
  x += blockIdx.x * stride;
  y += blockIdx.x * columns;
  const RowView view(y, columns);
  Pack in[VECS_PER_THREAD];
  Edges<THREADS> edges;
  load_row<THREADS>(in, Body<Pack>(x + view.head), first, view.vecs, minus_infinity());
  edges.load(x, view, first, minus_infinity());
  float e[EXPONENTIALS];
  // No barrier before the exponentials: a block-wide maximum would cost one barrier more.
  const float own = warp_max(edges_max(edges, row_max(in)));
  const float sum = warp_sum(exponentials(in, own, e) + edges_sum(edges, own));
  const Statistics row_stats = block_merge({own, sum}, scratch);
  write_row<THREADS>(y + view.head, in, e, own, row_stats, first, view.vecs);
  write_edges(y, view, edges, row_stats, first);
}

#endif
#else

// One row of grad and of y in a thread: its part of the body, and its edges.
template <int STEP> struct RowPair {
  Pack g[VECS_PER_THREAD], y[VECS_PER_THREAD];
  Edges<STEP> g_edges, y_edges;

  __device__ __forceinline__ void load(const WEFT_T* grad, const WEFT_T* out, const RowView& view,
                                       int first) {
    load_row<STEP>(g, Body<Pack>(grad + view.head), first, view.vecs, 0.0f);
    load_row<STEP>(y, Body<Pack>(out + view.head), first, view.vecs, 0.0f);
    g_edges.load(grad, view, first, 0.0f);
    y_edges.load(out, view, first, 0.0f);
  }
  __device__ __forceinline__ float dot() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) sum += pack_dot(g[i], y[i]);
#pragma unroll
    for (int k = 0; k < Edges<STEP>::COUNT; ++k) sum = fmaf(g_edges.at[k], y_edges.at[k], sum);
    return sum;
  }
  // Writes the gradient, dx = y (g - dot).
  __device__ __forceinline__ void write(WEFT_T* dx, const RowView& view, float dot, int first) {
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      discard_floats(g[i]);
      discard_floats(y[i]);
      const Pack out = packed([&](int j) { return element(y[i], j) * (element(g[i], j) - dot); });
      store_row<STEP>(dx + view.head, out, i, first, view.vecs);
    }
    y_edges.store(dx, view, first, [&](int k) { return y_edges.at[k] * (g_edges.at[k] - dot); });
  }
};

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
    const RowView view(dx + row * columns, row < rows ? columns : 0);
    RowPair<LANES> in;
    in.load(grad + row * stride, y + row * columns, view, first);
    in.write(dx + row * columns, view, warp_sum<LANES>(in.dot()), first);
  }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_block(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                       WEFT_T* __restrict__ dx, index_t columns, index_t stride) {
  __shared__ float scratch[32];
  const index_t row = blockIdx.x;
  const RowView view(dx + row * columns, columns);
  RowPair<THREADS> in;
  in.load(grad + row * stride, y + row * columns, view, threadIdx.x);
  in.write(dx + row * columns, view, block_sum(in.dot(), scratch), threadIdx.x);
}

#endif
#endif
