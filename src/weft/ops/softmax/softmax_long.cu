// Softmax of rows that do not fit in registers: one pass for the statistics (online), one for the output.
//
// softmax_long does both passes for a row in one block. For few rows several blocks share a row:
// softmax_statistics stores the statistics of each part in memory; softmax_write merges them and writes.
// Bytes: 2n read (the second time from L2 if the rows in flight fit there) + n written.
// Online maximum and sum: Milakov and Gimelshein, arXiv:1805.02867.
#include "softmax.cuh"

// The part of a row that a block takes: vectors `from` to `to` of its body, and the edges if it is the first.
struct Span {
  RowView view;
  int from, to;
  bool has_edges;

  __device__ __forceinline__ Span(const WEFT_T* out, index_t columns, int part = 0, int parts = 1)
      : view(out, columns), has_edges(PEEL && part == 0) {
    const int per_part = (view.vecs + parts - 1) / parts;
    from = min(part * per_part, view.vecs);
    to = min((part + 1) * per_part, view.vecs);
  }
  // True if this thread has an edge, which is the one of its own number.
  __device__ __forceinline__ bool edge_of_thread() const {
    return has_edges && (int)threadIdx.x < view.edges;
  }
  __device__ __forceinline__ int edge_column() const { return view.edge_column(threadIdx.x); }
};
static_assert(THREADS >= MOST_EDGES, "a thread has one edge at most");

// Returns the statistics of a span of one row, in every thread of the block. A larger maximum rescales the
// sum so far.
__device__ __forceinline__ Statistics statistics(const WEFT_T* row, const Span& span,
                                                 Statistics* scratch) {
  Statistics own = {LEAST, 0.0f};
  const Body<Pack> body(row + span.view.head);
  if (span.edge_of_thread()) {
    const float v = to_float(row[span.edge_column()]);
    own.top = fmaxf(LEAST, v);
    own.total = exp_of_difference(v, own.top);
  }
#pragma unroll 4
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack p = body[i];
    const float top = fmaxf(own.top, pack_max(p));
    // One rescale for each vector of N elements, not for each element.
    own.total *= exp_of_difference(own.top, top);
    own.top = top;
#pragma unroll
    for (int j = 0; j < N; ++j) own.total += exp_of_difference(element(p, j), top);
  }
  const float top = warp_max(own.top);
  const float total = warp_sum(own.total * exp_of_difference(own.top, top));
  return block_merge({top, total}, scratch);
}

__device__ __forceinline__ void write(const WEFT_T* x, WEFT_T* y, const Span& span, Statistics row_stats) {
  const float scale = __frcp_rn(row_stats.total);
  const Body<Pack> body(x + span.view.head);
  Pack* const out = reinterpret_cast<Pack*>(y + span.view.head);
  if (span.edge_of_thread()) {
    const float v = exp_of_difference(to_float(x[span.edge_column()]), row_stats.top);
    y[span.edge_column()] = from_float<WEFT_T>(v * scale);
  }
#pragma unroll 4
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack p = body[i];
    out[i] = packed([&](int j) { return exp_of_difference(element(p, j), row_stats.top) * scale; });
  }
}

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_long(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t columns,
             index_t stride) {
  __shared__ Statistics scratch[32];
  x += blockIdx.x * stride;
  y += blockIdx.x * columns;
  const Span all(y, columns);
  const Statistics row_stats = statistics(x, all, scratch);
  write(x, y, all, row_stats);
}

// parts: (rows, count) statistics, count <= 32. Block `row * count + part` takes one part of a row. Only the
// address of y is used here: it says how a row is cut.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_statistics(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ y,
                   Statistics* __restrict__ parts, index_t columns, index_t stride, index_t count) {
  __shared__ Statistics scratch[32];
  const int part = blockIdx.x % (int)count;
  const index_t row = blockIdx.x / (int)count;
  const Span span(y + row * columns, columns, part, count);
  const Statistics own = statistics(x + row * stride, span, scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = own;
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_write(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y,
              const Statistics* __restrict__ parts, index_t columns, index_t stride,
              index_t count) {
  const int lane = threadIdx.x % 32, part = blockIdx.x % (int)count;
  const index_t row = blockIdx.x / (int)count;
  const Statistics own = lane < count ? parts[row * count + lane] : Statistics{LEAST, 0.0f};
  const float top = warp_max(own.top);
  const float total = warp_sum(own.total * exp_of_difference(own.top, top));
  y += row * columns;
  write(x + row * stride, y, Span(y, columns, part, count), {top, total});
}

__device__ __forceinline__ float dot(const WEFT_T* grad, const WEFT_T* y, const Span& span,
                                     float* scratch) {
  float sum = 0.0f;
  const Body<Pack> g_body(grad + span.view.head), y_body(y + span.view.head);
  if (span.edge_of_thread()) sum = to_float(grad[span.edge_column()]) * to_float(y[span.edge_column()]);
#pragma unroll 4
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack g = g_body[i], p = y_body[i];
    sum += pack_dot(g, p);
  }
  return block_sum(sum, scratch);
}

__device__ __forceinline__ void write_gradient(const WEFT_T* grad, const WEFT_T* y, WEFT_T* dx,
                                               const Span& span, float row_dot) {
  const Body<Pack> g_body(grad + span.view.head), y_body(y + span.view.head);
  Pack* const out = reinterpret_cast<Pack*>(dx + span.view.head);
  if (span.edge_of_thread()) {
    const int column = span.edge_column();
    dx[column] = from_float<WEFT_T>(to_float(y[column]) * (to_float(grad[column]) - row_dot));
  }
#pragma unroll 2
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack g = g_body[i], p = y_body[i];
    out[i] = packed([&](int j) { return element(p, j) * (element(g, j) - row_dot); });
  }
}

// grad: (rows, columns), rows `stride` apart; y, dx: (rows, columns) contiguous. One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_long(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                      WEFT_T* __restrict__ dx, index_t columns, index_t stride) {
  __shared__ float scratch[32];
  grad += blockIdx.x * stride;
  y += blockIdx.x * columns;
  dx += blockIdx.x * columns;
  const Span all(dx, columns);
  const float row_dot = dot(grad, y, all, scratch);
  write_gradient(grad, y, dx, all, row_dot);
}

// parts: (rows, count) sums of grad * y. Only the address of dx is used here.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_dots(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
             const WEFT_T* __restrict__ dx, float* __restrict__ parts, index_t columns,
             index_t stride, index_t count) {
  __shared__ float scratch[32];
  const index_t row = blockIdx.x / (int)count;
  const Span span(dx + row * columns, columns, blockIdx.x % (int)count, count);
  const float own = dot(grad + row * stride, y + row * columns, span, scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = own;
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_write(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                       WEFT_T* __restrict__ dx, const float* __restrict__ parts, index_t columns,
                       index_t stride, index_t count) {
  const int lane = threadIdx.x % 32;
  const index_t row = blockIdx.x / (int)count;
  dx += row * columns;
  const Span span(dx, columns, blockIdx.x % (int)count, count);
  const float row_dot = warp_sum(lane < count ? parts[row * count + lane] : 0.0f);
  write_gradient(grad + row * stride, y + row * columns, dx, span, row_dot);
}
