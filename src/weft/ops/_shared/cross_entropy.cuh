// A row of logits: its log-sum-exp in one pass, the gradient of its loss in another.
//
// A row of `columns` elements begins at any element: of 50257 columns only every eighth 16-bit row
// starts on 16 bytes. It is walked as a head of fewer than N elements up to the boundary, a body of
// accesses of N elements (16 bytes), and a tail of fewer than N; the first threads take the ends,
// one element each. THREADS is a multiple of 32; all threads of a block work on one row.
// Online maximum and sum: Milakov and Gimelshein, arXiv:1805.02867.
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

constexpr int N = Wide<WEFT_T>::N;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST = -3.4028234663852886e38f;  // -inf - -inf would be NaN
using Access = Vector<WEFT_T, N>;
using Bits = uint4;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// exp(a - b) by the special-function unit (2 ulp); the difference first, for b LOG2E may overflow.
__device__ __forceinline__ float exp_of_difference(float a, float b) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"((a - b) * LOG2E));
  return e;
}

struct Row {
  int head, accesses, ends;  // ends: elements in head and tail together
  __device__ __forceinline__ Row(const WEFT_T* x, int columns) {
    const int past = (int)((unsigned long long)x % 16) / (int)sizeof(WEFT_T);
    head = min(past ? N - past : 0, columns);
    accesses = (columns - head) / N;
    ends = columns - accesses * N;
  }
  // The column of this thread's element of the ends; it has one if threadIdx.x < ends.
  __device__ __forceinline__ int end() const {
    return (int)threadIdx.x < head ? threadIdx.x : accesses * N + threadIdx.x;
  }
};

struct Statistics {
  float top, total, sum;  // maximum, sum of exp(x - top), sum of x (where SMOOTH)
};

__device__ __forceinline__ Statistics merge(Statistics a, Statistics b) {
  const float top = fmaxf(a.top, b.top);
  const float left = __fmul_rn(a.total, exp_of_difference(a.top, top));
  const float right = __fmul_rn(b.total, exp_of_difference(b.top, top));
  return {top, __fadd_rn(left, right), a.sum + b.sum};  // no multiply-add: its sides differ
}

// The same bits in all lanes: a merge's two sides are products and sums that commute.
__device__ __forceinline__ Statistics warp_merge(Statistics v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    v = merge(v, {__shfl_xor_sync(~0u, v.top, step), __shfl_xor_sync(~0u, v.total, step),
                  SMOOTH ? __shfl_xor_sync(~0u, v.sum, step) : 0.0f});
  return v;
}

// UNROLL accesses, all on their way before the first is used; past the body -inf, or 0 for a sum.
__device__ __forceinline__ void load(Access (&in)[UNROLL], const Access* body, int first,
                                     int accesses) {
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const int at = first + u * THREADS;
    if (at < accesses) {
      reinterpret_cast<Bits&>(in[u]) = *reinterpret_cast<const Bits*>(body + at);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) in[u].at[j] = from_float<WEFT_T>(minus_infinity());
    }
  }
}

// The block's statistics of a row, the same in every thread. NaN and +inf are dropped by fmaxf or
// by it found, and stand in the total either way. Ends with every element of the row read.
__device__ __forceinline__ Statistics statistics(const WEFT_T* x, const Row& row) {
  __shared__ Statistics scratch[32];
  Statistics mine = {LEAST, 0.0f, 0.0f};
  if ((int)threadIdx.x < row.ends) {
    const float v = to_float(x[row.end()]);
    mine.top = fmaxf(LEAST, v);
    mine.total = exp_of_difference(v, mine.top);
    mine.sum = v;
  }
  const Access* body = reinterpret_cast<const Access*>(x + row.head);
  for (int i = threadIdx.x; i < row.accesses; i += UNROLL * THREADS) {
    Access in[UNROLL];
    load(in, body, i, row.accesses);
    float top = mine.top;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int j = 0; j < N; ++j) top = fmaxf(top, to_float(in[u].at[j]));
    mine.total *= exp_of_difference(mine.top, top);
    mine.top = top;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float v = to_float(in[u].at[j]);
        mine.total += exp_of_difference(v, top);
        if (SMOOTH && i + u * THREADS < row.accesses) mine.sum += v;
      }
  }
  mine = warp_merge(mine);
  if (THREADS > 32) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = warp_merge(lane < THREADS / 32 ? scratch[lane] : Statistics{LEAST, 0.0f, 0.0f});
  } else {
    __syncwarp();
  }
  return mine;
}

// What a call asks of every row. smoothing e, z_loss z, each = e / columns.
struct Asked {
  int columns;
  float smoothing, each, z_loss;
  __device__ __forceinline__ Asked(index_t columns_, double smoothing_, double z_loss_)
      : columns((int)columns_), smoothing((float)smoothing_),
        each((float)smoothing_ / (float)columns_), z_loss((float)z_loss_) {}
};

struct Answer {
  float loss, lse;
};

// The loss and log-sum-exp of a row; NaN where the target is out of range, which reads column 0.
__device__ __forceinline__ Answer loss_of(const WEFT_T* x, const Row& row, index_t target,
                                          const Asked& asked) {
  const bool inside = target >= 0 && target < asked.columns;
  const float picked = to_float(x[inside ? target : 0]);
  const Statistics all = statistics(x, row);
  // A row of nothing but -inf has a total of 0; a NaN fails the comparison too.
  const float lse = inside && all.total > 0.0f ? all.top + logf(all.total) : not_a_number();
  float loss = lse + asked.z_loss * lse * lse;
  loss -= SMOOTH ? (1.0f - asked.smoothing) * picked + asked.each * all.sum : picked;
  return {loss, lse};
}

// One row's gradient times g; dx may be x. `keep`: the row counts; else it is not read, and lse
// must be a number (0), for 0 times what comes of a NaN is none.
__device__ __forceinline__ void write_gradient(const WEFT_T* x, WEFT_T* dx, const Row& row,
                                               index_t target, float lse, float g, bool keep,
                                               const Asked& asked) {
  const float factor = keep ? g * (1.0f + 2.0f * asked.z_loss * lse) : 0.0f;
  const float each = keep ? g * asked.each : 0.0f;
  const float at_target = keep ? g * (1.0f - asked.smoothing) : 0.0f;
  const int hit = keep && target >= 0 && target < asked.columns ? (int)target : -1;
  const auto of = [&](WEFT_T v) {
    return factor * exp_of_difference(to_float(v), lse) - each;
  };
  const auto single = [&](int column) {
    const float d = keep ? of(x[column]) : 0.0f;
    dx[column] = from_float<WEFT_T>(column == hit ? d - at_target : d);
  };
  if ((int)threadIdx.x < row.ends) single(row.end());
  const Access* body = reinterpret_cast<const Access*>(x + row.head);
  if (((unsigned long long)(dx + row.head) & 15) != 0) {  // the gradient's rows lie otherwise
    for (int i = threadIdx.x; i < row.accesses * N; i += THREADS) single(row.head + i);
    return;
  }
  Access* out = reinterpret_cast<Access*>(dx + row.head);
  for (int i = threadIdx.x; i < row.accesses; i += UNROLL * THREADS) {
    Access in[UNROLL];
    load(in, body, i, keep ? row.accesses : 0);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int at = i + u * THREADS;
      const int near = hit - row.head - at * N;  // where in this access the target is, if it is
      Access made;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float d = of(in[u].at[j]);
        made.at[j] = from_float<WEFT_T>(j == near ? d - at_target : d);
      }
      if (at < row.accesses) reinterpret_cast<Bits&>(out[at]) = reinterpret_cast<Bits&>(made);
    }
  }
}
