// Softmax of rows too long for registers: statistics online in one pass, answers in a second.
//
// softmax_long does both for a row in one block. Where rows are few, PARTS blocks share a row:
// softmax_statistics leaves each part's statistics in memory, softmax_write merges them and writes.
// Bytes: 2n read (the second time from L2 where the rows in flight fit there) + n written.
// Online maximum and sum: Milakov and Gimelshein, arXiv:1805.02867.
#include "softmax.cuh"

struct Span {
  int from, to;  // accesses of a row
};

__device__ __forceinline__ Span span_of(index_t columns, int part, int parts) {
  const int accesses = columns / N, each = (accesses + parts - 1) / parts;
  return {min(part * each, accesses), min((part + 1) * each, accesses)};
}

// The block's statistics of a span of one row.
__device__ __forceinline__ Statistics statistics(const WEFT_T* row, Span span,
                                                 Statistics* scratch) {
  Statistics mine = {LEAST, 0.0f};
#pragma unroll 4
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack p = reinterpret_cast<const Pack*>(row)[i];
    const float top = fmaxf(mine.top, pack_max(p));
    mine.total *= exp_of_difference(mine.top, top);
    mine.top = top;
#pragma unroll
    for (int j = 0; j < N; ++j) mine.total += exp_of_difference(element(p, j), top);
  }
  const float top = warp_max(mine.top);
  const float total = warp_sum(mine.total * exp_of_difference(mine.top, top));
  return block_merge({top, total}, scratch);
}

__device__ __forceinline__ void write(const WEFT_T* x, WEFT_T* y, Span span, Statistics whole) {
  const float scale = __frcp_rn(whole.total);
#pragma unroll 4
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack p = reinterpret_cast<const Pack*>(x)[i];
    reinterpret_cast<Pack*>(y)[i] = packed(
        [&](int j) { return exp_of_difference(element(p, j), whole.top) * scale; });
  }
}

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_long(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t columns,
             index_t stride) {
  __shared__ Statistics scratch[32];
  const Span all = span_of(columns, 0, 1);
  x += blockIdx.x * stride;
  const Statistics whole = statistics(x, all, scratch);
  write(x, y + blockIdx.x * columns, all, whole);
}

// parts: (rows, PARTS) statistics, PARTS <= 32. Block `row * PARTS + part` takes one part of a row.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_statistics(const WEFT_T* __restrict__ x, Statistics* __restrict__ parts, index_t columns,
                   index_t stride, index_t count) {
  __shared__ Statistics scratch[32];
  const int part = blockIdx.x % (int)count;
  const WEFT_T* row = x + (blockIdx.x / (int)count) * stride;
  const Statistics mine = statistics(row, span_of(columns, part, count), scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = mine;
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_write(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y,
              const Statistics* __restrict__ parts, index_t columns, index_t stride,
              index_t count) {
  const int lane = threadIdx.x % 32, part = blockIdx.x % (int)count;
  const index_t row = blockIdx.x / (int)count;
  const Statistics mine = lane < count ? parts[row * count + lane] : Statistics{LEAST, 0.0f};
  const float top = warp_max(mine.top);
  const float total = warp_sum(mine.total * exp_of_difference(mine.top, top));
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
                                               Span span, float whole) {
#pragma unroll 2
  for (int i = span.from + (int)threadIdx.x; i < span.to; i += THREADS) {
    const Pack g = reinterpret_cast<const Pack*>(grad)[i];
    const Pack p = reinterpret_cast<const Pack*>(y)[i];
    reinterpret_cast<Pack*>(dx)[i] =
        packed([&](int j) { return element(p, j) * (element(g, j) - whole); });
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
  const float whole = dot(grad, y, all, scratch);
  write_gradient(grad, y, dx + blockIdx.x * columns, all, whole);
}

// parts: (rows, PARTS) sums of g y.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_dots(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
             float* __restrict__ parts, index_t columns, index_t stride, index_t count) {
  __shared__ float scratch[32];
  const index_t row = blockIdx.x / (int)count;
  const Span span = span_of(columns, blockIdx.x % (int)count, count);
  const float mine = dot(grad + row * stride, y + row * columns, span, scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = mine;
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_write(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                       WEFT_T* __restrict__ dx, const float* __restrict__ parts, index_t columns,
                       index_t stride, index_t count) {
  const int lane = threadIdx.x % 32;
  const index_t row = blockIdx.x / (int)count;
  const Span span = span_of(columns, blockIdx.x % (int)count, count);
  const float whole = warp_sum(lane < count ? parts[row * count + lane] : 0.0f);
  write_gradient(grad + row * stride, y + row * columns, dx + row * columns, span, whole);
}
