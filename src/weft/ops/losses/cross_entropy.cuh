// Cross entropy of one row of logits: log-sum-exp in one pass, the gradient in another.
//
// A row of `columns` elements may begin at any element: of 50257 columns only every eighth 16-bit row
// starts on 16 bytes. It is walked as a head of fewer than N elements up to the boundary, a body of vectors
// of N elements (16 bytes), and a tail of fewer than N. The first threads take the edges (head and tail),
// one element each. THREADS is a multiple of 32; all threads of a block work on one row. Online maximum and
// sum: Milakov and Gimelshein, arXiv:1805.02867.
// BY_COLUMN: there is no head, so that a thread sums the same columns wherever the row begins: the bits of a
// row do not depend on its address. The vectors of a row that is not aligned are loaded element by element.
#pragma once
#include "numeric.cuh"
#include "reduce.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef UNROLL
#define UNROLL 2
#endif
#ifndef SMOOTH
#define SMOOTH 0
#endif

#ifndef BY_COLUMN
#define BY_COLUMN 0
#endif

constexpr int N = Wide<WEFT_T>::N;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -3.4028234663852886e38f;  // the least finite number: -inf - -inf would be NaN
using Vec = Vector<WEFT_T, N>;
using Bits = uint4;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// exp(a - b) by the special-function unit (2 ulp). The difference comes first, because b LOG2E may overflow.
__device__ __forceinline__ float exp_of_difference(float a, float b) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"((a - b) * LOG2E));
  return e;
}

struct Row {
  int head, vectors, edges;  // elements of the head, vectors of the body, elements of head and tail
  __device__ __forceinline__ Row(const WEFT_T* x, int columns) {
    // The address decides, not the row's number: logits may be a view that begins anywhere.
    const int misalignment = (int)((unsigned long long)x % 16) / (int)sizeof(WEFT_T);
    head = BY_COLUMN ? 0 : min(misalignment ? N - misalignment : 0, columns);
    vectors = (columns - head) / N;
    edges = columns - vectors * N;
  }
  // The column of this thread's edge element; the thread has one if threadIdx.x < edges.
  __device__ __forceinline__ int edge_column() const {
    return (int)threadIdx.x < head ? threadIdx.x : vectors * N + threadIdx.x;
  }
};

struct Statistics {
  float top, total, sum;  // maximum, sum of exp(x - top), sum of x (where SMOOTH)
};

__device__ __forceinline__ Statistics merge(Statistics a, Statistics b) {
  const float top = fmaxf(a.top, b.top);
  const float left = __fmul_rn(a.total, exp_of_difference(a.top, top));
  const float right = __fmul_rn(b.total, exp_of_difference(b.top, top));
  // No multiply-add: it would round the two sides differently, and lanes would disagree.
  return {top, __fadd_rn(left, right), a.sum + b.sum};
}

// Every lane gets the same bits, because the products and sums of a merge commute.
__device__ __forceinline__ Statistics warp_merge(Statistics v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    v = merge(v, {__shfl_xor_sync(~0u, v.top, step), __shfl_xor_sync(~0u, v.total, step),
                  SMOOTH ? __shfl_xor_sync(~0u, v.sum, step) : 0.0f});
  return v;
}

// Load UNROLL vectors, all in flight before the first is used; past the body -inf, whose exp is 0.
__device__ __forceinline__ void load_vectors(Vec (&in)[UNROLL], const Vec* body,
                                             int first, int vectors) {
  const bool is_aligned = !BY_COLUMN || (unsigned long long)body % sizeof(Bits) == 0;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const int at = first + u * THREADS;
    if (at < vectors && !is_aligned) {
#pragma unroll
      for (int j = 0; j < N; ++j) in[u].at[j] = reinterpret_cast<const WEFT_T*>(body)[at * N + j];
    } else if (at < vectors) {
      reinterpret_cast<Bits&>(in[u]) = *reinterpret_cast<const Bits*>(body + at);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) in[u].at[j] = from_float<WEFT_T>(minus_infinity());
    }
  }
}

// The statistics of a row, the same in every thread of the block. fmaxf drops a NaN, but the total becomes
// NaN, as it does for +inf. After the return, every thread has read its elements of the row (it ends with a
// barrier): the caller may overwrite the row.
__device__ __forceinline__ Statistics row_statistics(const WEFT_T* x, const Row& row) {
  __shared__ Statistics scratch[32];
  Statistics stats = {LOWEST, 0.0f, 0.0f};
  if ((int)threadIdx.x < row.edges) {
    const float v = to_float(x[row.edge_column()]);
    stats.top = fmaxf(LOWEST, v);
    stats.total = exp_of_difference(v, stats.top);
    stats.sum = v;
  }
  const Vec* body = reinterpret_cast<const Vec*>(x + row.head);
  for (int i = threadIdx.x; i < row.vectors; i += UNROLL * THREADS) {
    Vec in[UNROLL];
    load_vectors(in, body, i, row.vectors);
    // The maximum of all UNROLL vectors first, then one rescale of the sum for all of them: one extra exp2
    // for UNROLL * N elements.
    float top = stats.top;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int j = 0; j < N; ++j) top = fmaxf(top, to_float(in[u].at[j]));
    const float factor = exp_of_difference(stats.top, top);
    // By column the loop may be compiled twice, for aligned rows and others: without a multiply-add, which
    // the compiler is free to form, both copies round alike.
    stats.total = BY_COLUMN ? __fmul_rn(stats.total, factor) : stats.total * factor;
    stats.top = top;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float v = to_float(in[u].at[j]);
        stats.total += exp_of_difference(v, top);
        // Vectors past the row are filled with -inf, which must not reach the plain sum of the logits.
        if (SMOOTH && i + u * THREADS < row.vectors) stats.sum += v;
      }
  }
  stats = warp_merge(stats);
  if (THREADS > 32) {
    // Every warp merges all warps' statistics itself: one barrier, and no broadcast.
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = stats;
    __syncthreads();
    stats = warp_merge(lane < THREADS / 32 ? scratch[lane] : Statistics{LOWEST, 0.0f, 0.0f});
  } else {
    __syncwarp();
  }
  return stats;
}

// Arguments of the loss, equal for all rows: label smoothing e, z-loss factor z, uniform = e / columns.
struct LossParams {
  int columns;
  float smoothing, uniform, z_loss;
  __device__ __forceinline__ LossParams(index_t columns_, double smoothing_, double z_loss_)
      : columns((int)columns_), smoothing((float)smoothing_),
        uniform((float)smoothing_ / (float)columns_), z_loss((float)z_loss_) {}
};

struct RowLoss {
  float loss, lse;
};

// The loss and log-sum-exp of a row; NaN if the target is out of range, in which case column 0 is read.
__device__ __forceinline__ RowLoss row_loss(const WEFT_T* x, const Row& row, index_t target,
                                          const LossParams& params) {
  const bool in_range = target >= 0 && target < params.columns;
  const float target_logit = to_float(x[in_range ? target : 0]);
  const Statistics stats = row_statistics(x, row);
  // A row with -inf alone has a total of 0; a NaN fails the comparison too.
  const float lse = in_range && stats.total > 0.0f ? stats.top + logf(stats.total) : not_a_number();
  // With smoothing e: lse - (1 - e) x[target] - e mean(x), from the plain sum of the logits.
  float loss = lse + params.z_loss * lse * lse;
  loss -= SMOOTH ? (1.0f - params.smoothing) * target_logit + params.uniform * stats.sum : target_logit;
  return {loss, lse};
}

// Write one row's gradient times g; dx may be x. An ignored row (`counts` false) is not read, and its lse
// must be finite (0): a factor of 0 does not remove a NaN.
__device__ __forceinline__ void write_gradient(const WEFT_T* x, WEFT_T* dx, const Row& row,
                                               index_t target, float lse, float g, bool counts,
                                               const LossParams& params) {
  // dx = factor softmax(x) - uniform - (1 - e) [column is the target]. The softmax is exp(x - lse): no second
  // sum.
  const float factor = counts ? g * (1.0f + 2.0f * params.z_loss * lse) : 0.0f;
  const float uniform = counts ? g * params.uniform : 0.0f;
  const float at_target = counts ? g * (1.0f - params.smoothing) : 0.0f;
  const int target_column = counts && target >= 0 && target < params.columns ? (int)target : -1;
  const auto element_gradient = [&](WEFT_T v) {
    const float term = exp_of_difference(to_float(v), lse);
    // By column every copy of this code rounds once; otherwise the compiler may choose.
    return BY_COLUMN ? fmaf(factor, term, -uniform) : factor * term - uniform;
  };
  // The target is subtracted before the only rounding: a separate pass over one element would round twice.
  const auto write_element = [&](int column) {
    const float d = counts ? element_gradient(x[column]) : 0.0f;
    dx[column] = from_float<WEFT_T>(column == target_column ? d - at_target : d);
  };
  if ((int)threadIdx.x < row.edges) write_element(row.edge_column());
  const Vec* body = reinterpret_cast<const Vec*>(x + row.head);
  if (((unsigned long long)(dx + row.head) & 15) != 0) {  // dx is aligned differently: element by element
    for (int i = threadIdx.x; i < row.vectors * N; i += THREADS) write_element(row.head + i);
    return;
  }
  Vec* out = reinterpret_cast<Vec*>(dx + row.head);
  for (int i = threadIdx.x; i < row.vectors; i += UNROLL * THREADS) {
    Vec in[UNROLL];
    load_vectors(in, body, i, counts ? row.vectors : 0);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int at = i + u * THREADS;
      const int target_lane = target_column - row.head - at * N;  // in 0..N-1 if this vector has it
      Vec gradient;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float d = element_gradient(in[u].at[j]);
        gradient.at[j] = from_float<WEFT_T>(j == target_lane ? d - at_target : d);
      }
      if (at < row.vectors) reinterpret_cast<Bits&>(out[at]) = reinterpret_cast<Bits&>(gradient);
    }
  }
}
