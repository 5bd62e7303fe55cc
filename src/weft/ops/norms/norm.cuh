// Basics of the norm kernels: vectors of VEC_WIDTH elements, block sums with one barrier, dropout.
//
// CENTRED 1 is layer norm (mean and bias), 0 is RMS norm. RESIDUAL adds a second tensor r: the kernel
// normalises s = x + r, rounded to the dtype, and writes s too. WITH_DROPOUT drops elements of x
// before the sum (philox_dropout.cuh); a vector of 8 elements uses one block of random words.
#pragma once
#include "numeric.cuh"
#include "reduce.cuh"

#ifndef VEC_WIDTH
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#endif
#ifndef WEFT_W
#define WEFT_W WEFT_T
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef CENTRED
#define CENTRED 0
#endif
#ifndef RESIDUAL
#define RESIDUAL 0
#endif
#ifndef WITH_DROPOUT
#define WITH_DROPOUT 0
#endif

constexpr int N = VEC_WIDTH;
using Pack = Vector<WEFT_T, N>;
using Weights = Vector<WEFT_W, N>;
#include "row_view.cuh"

// Weights or biases of a row's body; those of the row begin at a multiple of 16 bytes. With PEEL the body
// begins at any column: a vector is then cut out of aligned ones, none of which lies past the last column.
struct Columns {
  const WEFT_W* first;  // of the body
  int past;             // bytes from `first` back to a multiple of 16
  int last;             // number of the block of 16 bytes, from there, that holds the last column

  __device__ __forceinline__ explicit Columns(const WEFT_W* first_) : first(first_), past(0), last(0) {}
  __device__ __forceinline__ Columns(const WEFT_W* all, int from, int columns)
      : first(all + from), past(PEEL ? from * (int)sizeof(WEFT_W) % 16 : 0),
        last(((columns - from) * (int)sizeof(WEFT_W) + past - 1) / 16) {}
  __device__ __forceinline__ Weights operator[](int i) const {
    if constexpr (PEEL && sizeof(Weights) % 16 == 0) {
      constexpr int BLOCKS = sizeof(Weights) / 16;
      const char* const base = reinterpret_cast<const char*>(first) - past;
      return joined<Weights>(reinterpret_cast<const uint4*>(base) + i * BLOCKS,
                             min(BLOCKS, last - i * BLOCKS), past);
    } else if constexpr (PEEL) {
      Weights v;
#pragma unroll
      for (int j = 0; j < N; ++j) v.at[j] = first[i * N + j];
      return v;
    }
    return reinterpret_cast<const Weights*>(first)[i];
  }
};

// Several sums travel together, so that they share one barrier.
template <int K> struct Sums { float at[K]; };

// Sum over the block with one barrier. `scratch` holds 32 entries of shared memory. Two calls that
// alternate between two scratch arrays need no second barrier: a warp writes the first array again
// only after the barrier of the call between, when every warp has read it.
template <int K>
__device__ __forceinline__ Sums<K> block_sums(Sums<K> v, Sums<K>* scratch) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < K; ++k) v.at[k] = warp_sum(v.at[k]);
  if (lane == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  const bool has_warp = lane < THREADS / 32;
#pragma unroll
  for (int k = 0; k < K; ++k) v.at[k] = warp_sum(has_warp ? scratch[lane].at[k] : 0.0f);
  return v;
}

// 1 / sqrt(v), correctly rounded: computed once a row, and an error here scales the whole row.
__device__ __forceinline__ float inverse_root(float v) { return __frcp_rn(__fsqrt_rn(v)); }

// max(v, 0) that keeps NaN; fmaxf would drop it.
__device__ __forceinline__ float not_below_zero(float v) { return v < 0.0f ? 0.0f : v; }

__device__ __forceinline__ Pack zeros() {
  Pack p;
#pragma unroll
  for (int j = 0; j < N; ++j) p.at[j] = from_float<WEFT_T>(0.0f);
  return p;
}

// Returns load(), or zeros if the vector does not exist. The two cases meet as words: the compiler would hold
// 16-bit elements that come from either case one a register.
template <typename Load> __device__ __forceinline__ Pack load_if(bool exists, Load load) {
  if constexpr (sizeof(Pack) != 16) return exists ? load() : zeros();
  uint4 words = {0, 0, 0, 0};
  if (exists) {
    const Pack loaded = load();
    memcpy(&words, &loaded, sizeof(Pack));
  }
  Pack p = {};
  memcpy(&p, &words, sizeof(Pack));
  return p;
}

// Makes the compiler forget the floats it converted from `p`: to convert again costs an instruction,
// to hold the floats costs a register each. The empty asm hides the words' values from the compiler.
template <typename P> __device__ __forceinline__ void discard_floats(P& p) {
  if (sizeof(P) == 4 * N) return;
  constexpr int WORDS = sizeof(P) / 4;  // 0 for a single 16-bit element
  unsigned words[WORDS + 1];
  memcpy(words, &p, 4 * WORDS);
#pragma unroll
  for (int k = 0; k < WORDS; ++k) asm volatile("" : "+r"(words[k]));
  memcpy(&p, words, 4 * WORDS);
}

// x + r, rounded to the dtype.
__device__ __forceinline__ Pack add_residual(const Pack& x, const Pack& r) {
  Pack s;
#pragma unroll
  for (int j = 0; j < N; ++j) s.at[j] = from_float<WEFT_T>(to_float(x.at[j]) + to_float(r.at[j]));
  return s;
}

#if WITH_DROPOUT
#include "philox_dropout.cuh"
#define DROPOUT_PARAMETERS , index_t seed, index_t rule
#define DROPOUT Dropout{seed, rule}
#else
struct Dropout {
  template <int M>
  __device__ __forceinline__ void apply(float (&)[M], index_t) const {}
};
#define DROPOUT_PARAMETERS
#define DROPOUT Dropout{}
#endif

// dropout(x) + r, rounded to the dtype. `first` is the index of x's first element in the tensor, by
// which the random words are found.
__device__ __forceinline__ Pack add_residual(const Pack& x, const Pack& r, const Dropout& dropout,
                                             index_t first) {
  float dropped[N];
  Pack s;
#pragma unroll
  for (int j = 0; j < N; ++j) dropped[j] = element(x, j);
  dropout.apply(dropped, first);
#pragma unroll
  for (int j = 0; j < N; ++j) s.at[j] = from_float<WEFT_T>(dropped[j] + element(r, j));
  return s;
}

#ifdef SUM_THREADS
// Block (c, which): sums 32 columns of partials[which], (parts, columns), in a fixed order, so that
// two runs give the same bits. A warp takes every 16th row, twelve at once: with one part for each
// SM, all loads are then in flight together.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
norm_sum_partials(const float* __restrict__ partials, WEFT_W* __restrict__ dw,
                  WEFT_W* __restrict__ db, index_t parts, index_t columns) {
  constexpr int GROUPS = SUM_THREADS / 32, BATCH = 12;
  __shared__ float sums[GROUPS][32];
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const index_t column = (index_t)blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < columns) {
    const float* from = partials + blockIdx.y * parts * columns + column;
    for (int row = group; row < parts; row += BATCH * GROUPS) {
      float batch[BATCH];
#pragma unroll
      for (int k = 0; k < BATCH; ++k)
        batch[k] = row + k * GROUPS < parts ? from[(row + k * GROUPS) * columns] : 0.0f;
#pragma unroll
      for (int k = 0; k < BATCH; ++k) sum += batch[k];
    }
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group || column >= columns) return;
#pragma unroll
  for (int k = 1; k < GROUPS; ++k) sum += sums[k][lane];
  (blockIdx.y ? db : dw)[column] = from_float<WEFT_W>(sum);
}

// The same for few partial rows of many columns, a column a thread: the blocks above would have 16 warps of a
// row or two each, and at 65536 columns there would be 4096 of them.
extern "C" __global__ void __launch_bounds__(COLUMN_THREADS)
norm_sum_few_partials(const float* __restrict__ partials, WEFT_W* __restrict__ dw,
                      WEFT_W* __restrict__ db, index_t parts, index_t columns) {
  constexpr int BATCH = 16;
  const index_t column = (index_t)blockIdx.x * COLUMN_THREADS + threadIdx.x;
  if (column >= columns) return;
  const float* from = partials + blockIdx.y * parts * columns + column;
  float sum = 0.0f;
  for (int row = 0; row < parts; row += BATCH) {
    float batch[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; ++k) batch[k] = row + k < parts ? from[(row + k) * columns] : 0.0f;
    // In pairs: as few roundings one after another as in the kernel above.
#pragma unroll
    for (int step = BATCH / 2; step > 0; step /= 2)
#pragma unroll
      for (int k = 0; k < step; ++k) batch[k] += batch[k + step];
    sum += batch[0];
  }
  (blockIdx.y ? db : dw)[column] = from_float<WEFT_W>(sum);
}
#endif
