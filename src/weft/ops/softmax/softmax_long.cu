// Softmax of rows that do not fit in registers: one pass for the statistics (online), one for the output.
//
// softmax_long does both passes for a row in one block. For few rows several blocks share a row:
// softmax_statistics stores the statistics of each part in memory; softmax_write merges them and writes.
// Bytes: 2n read (the second time from L2 if the rows in flight fit there) + n written.
// Online maximum and sum: Milakov and Gimelshein, arXiv:1805.02867.
#include "softmax.cuh"

struct Span {
  int from, to;  // vectors of a row
};

__device__ __forceinline__ Span span_of(index_t columns, int part, int parts) {
  const int vecs = columns / N, per_part = (vecs + parts - 1) / parts;
  return {min(part * per_part, vecs), min((part + 1) * per_part, vecs)};
}

// Returns the statistics of a span of one row, in every thread of the block. A larger maximum rescales the
// sum so far.
__device__ __forceinline__ Statistics statistics(const WEFT_T* row, Span span,
                                                 Statistics* scratch) {
  Statistics own = {LEAST, 0.0f};
#pragma unroll 4
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack p = reinterpret_cast<const Pack*>(row)[i];
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

__device__ __forceinline__ void write(const WEFT_T* x, WEFT_T* y, Span span, Statistics row_stats) {
  const float scale = __frcp_rn(row_stats.total);
#pragma unroll 4
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack p = reinterpret_cast<const Pack*>(x)[i];
    reinterpret_cast<Pack*>(y)[i] = packed(
        [&](int j) { return exp_of_difference(element(p, j), row_stats.top) * scale; });
  }
}

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_long(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t columns,
             index_t stride) {
  __shared__ Statistics scratch[32];
  const Span all = span_of(columns, 0, 1);
  x += blockIdx.x * stride;
  const Statistics row_stats = statistics(x, all, scratch);
  write(x, y + blockIdx.x * columns, all, row_stats);
}

// parts: (rows, count) statistics, count <= 32. Block `row * count + part` takes one part of a row.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_statistics(const WEFT_T* __restrict__ x, Statistics* __restrict__ parts, index_t columns,
                   index_t stride, index_t count) {
  __shared__ Statistics scratch[32];
  const int part = blockIdx.x % (int)count;
  const WEFT_T* row = x + (blockIdx.x / (int)count) * stride;
  const Statistics own = statistics(row, span_of(columns, part, count), scratch);
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
  write(x + row * stride, y + row * columns, span_of(columns, part, count), {top, total});
}

__device__ __forceinline__ float dot(const WEFT_T* grad, const WEFT_T* y, Span span,
                                     float* scratch) {
  float sum = 0.0f;
#pragma unroll 4
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack g = reinterpret_cast<const Pack*>(grad)[i];
    const Pack p = reinterpret_cast<const Pack*>(y)[i];
    sum += pack_dot(g, p);
  }
  return block_sum(sum, scratch);
}

__device__ __forceinline__ void write_gradient(const WEFT_T* grad, const WEFT_T* y, WEFT_T* dx,
                                               Span span, float row_dot) {
#pragma unroll 2
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack g = reinterpret_cast<const Pack*>(grad)[i];
    const Pack p = reinterpret_cast<const Pack*>(y)[i];
    reinterpret_cast<Pack*>(dx)[i] =
        packed([&](int j) { return element(p, j) * (element(g, j) - row_dot); });
  }
}

// grad: (rows, columns), rows `stride` apart; y, dx: (rows, columns) contiguous. One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_long(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                      WEFT_T* __restrict__ dx, index_t columns, index_t stride) {
  __shared__ float scratch[32];
  const Span all = span_of(columns, 0, 1);
  grad += blockIdx.x * stride;
  y += blockIdx.x * columns;
  const float row_dot = dot(grad, y, all, scratch);
  write_gradient(grad, y, dx + blockIdx.x * columns, all, row_dot);
}

// parts: (rows, count) sums of grad * y.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_dots(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
             float* __restrict__ parts, index_t columns, index_t stride, index_t count) {
  __shared__ float scratch[32];
  const index_t row = blockIdx.x / (int)count;
  const Span span = span_of(columns, blockIdx.x % (int)count, count);
  const float own = dot(grad + row * stride, y + row * columns, span, scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = own;
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_write(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                       WEFT_T* __restrict__ dx, const float* __restrict__ parts, index_t columns,
                       index_t stride, index_t count) {
  const int lane = threadIdx.x % 32;
  const index_t row = blockIdx.x / (int)count;
  const Span span = span_of(columns, blockIdx.x % (int)count, count);
  const float row_dot = warp_sum(lane < count ? parts[row * count + lane] : 0.0f);
  write_gradient(grad + row * stride, y + row * columns, dx + row * columns, span, row_dot);
}
