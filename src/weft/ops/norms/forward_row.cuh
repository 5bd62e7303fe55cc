// Steps of the forward kernels that hold rows in registers: load, partial sums, output.
#pragma once
#include "row_statistics.cuh"

#ifndef ROWS
#define ROWS 1  // rows that a block holds at once
#endif
#ifndef EVICT_FIRST
#define EVICT_FIRST 0
#endif

// x and r are read once: with EVICT_FIRST they leave L1 first, so that the weights stay there.
__device__ __forceinline__ Pack load_vector(const Pack* from) {
  if (!EVICT_FIRST || sizeof(Pack) != 16) return *from;
  const uint4 words = __ldcs(reinterpret_cast<const uint4*>(from));
  Pack p;
  memcpy(&p, &words, sizeof(Pack));
  return p;
}

__device__ __forceinline__ Pack load_vector(const Body<Pack>& body, int at) {
  return PEEL == 2 ? body[at] : load_vector(body.base + at);
}

// Adds one element to a thread's sums about `ref`.
__device__ __forceinline__ void add_element(PartialSums& sums, float value, float ref) {
  const float diff = value - ref;
  if (CENTRED) sums.at[0] += diff;
  // About a reference near the mean: E[x^2] - E[x]^2 would cancel for a row far from zero.
  sums.at[SQUARES] = fmaf(diff, diff, sums.at[SQUARES]);
}

// This thread's sums of a row about `ref`; `first` is the index of its first vector.
__device__ __forceinline__ PartialSums thread_sums(const Pack (&x)[VECS_PER_THREAD], float ref,
                                                   int first, int count) {
  PartialSums sums = {};
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    // Zeros past the end would count as -ref.
    if (!NO_TAIL && first + i * TEAM >= count) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) add_element(sums, to_float(x[i].at[j]), ref);
  }
  return sums;
}

// The weights and biases of a thread's vectors.
struct ThreadWeights {
  Weights weight[VECS_PER_THREAD], bias[CENTRED ? VECS_PER_THREAD : 1];

  __device__ __forceinline__ void load_one(const Columns& w, const Columns& b, int i, int at) {
    weight[i] = w[at];
    if (CENTRED) bias[CENTRED ? i : 0] = b[at];
  }
  __device__ __forceinline__ void load(const Columns& w, const Columns& b, int first, int count) {
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i)
      if (NO_TAIL || first + i * TEAM < count) load_one(w, b, i, first + i * TEAM);
  }
};

// One element of the output. The offset is computed once for a row: the compiler moves it out of the loop.
__device__ __forceinline__ WEFT_T normalised(float value, float ref, const RowStatistics& row, WEFT_W weight,
                                             WEFT_W bias) {
  const float diff = value - ref, offset = -row.shift * row.rstd;
  // (x - ref - shift) rstd as one fma, with offset = -shift rstd.
  const float xhat = CENTRED ? fmaf(diff, row.rstd, offset) : diff * row.rstd;
  const float scaled = xhat * to_float(weight);
  return from_float<WEFT_T>(CENTRED ? scaled + to_float(bias) : scaled);
}

// Writes the outputs of the rows; `y` is the first row's and `rows_left` rows remain in the tensor.
// LOAD_WEIGHTS: the weights come from w and b here; otherwise `weights` holds them already. The
// floats of x are converted again rather than held: more registers a thread mean fewer resident
// blocks.
template <bool LOAD_WEIGHTS>
__device__ __forceinline__ void write_rows(Pack (&x)[ROWS][VECS_PER_THREAD], const float (&ref)[ROWS],
                                           const RowStatistics (&statistics)[ROWS],
                                           ThreadWeights& weights, const Columns& w,
                                           const Columns& b, WEFT_T* y, index_t columns,
                                           index_t rows_left, int count) {
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (!NO_TAIL && at >= count) continue;
    if (LOAD_WEIGHTS) weights.load_one(w, b, i, at);
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      // The first row of a block always exists; the compiler then drops the test for ROWS = 1.
      if (k && k >= rows_left) break;
      discard_floats(x[k][i]);
      Pack out;
#pragma unroll
      for (int j = 0; j < N; ++j)
        out.at[j] = normalised(to_float(x[k][i].at[j]), ref[k], statistics[k], weights.weight[i].at[j],
                               weights.bias[CENTRED ? i : 0].at[j]);
      reinterpret_cast<Pack*>(y + k * columns)[at] = out;
    }
  }
}
