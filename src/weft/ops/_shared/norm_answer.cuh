// What the forward does with rows in registers: their warps' sums, and their answers.
#pragma once
#include "norm_merge.cuh"

#ifndef ROWS
#define ROWS 1
#endif
#ifndef STREAM
#define STREAM 0
#endif

// x and r are read once: with STREAM they give way first in L1, where the weights stay.
__device__ __forceinline__ Pack loaded(const Pack* from) {
  if (!STREAM || sizeof(Pack) != 16) return *from;
  const uint4 words = __ldcs(reinterpret_cast<const uint4*>(from));
  Pack p;
  memcpy(&p, &words, sizeof(Pack));
  return p;
}

// A warp's part of the sums of a row about `ref`; `first` is this thread's first access.
__device__ __forceinline__ Parts sums_of(const Pack (&x)[VECTORS], float ref, int first,
                                         int count) {
  Parts sums = {};
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (!FULL && first + i * TEAM >= count) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float left = to_float(x[i].at[j]) - ref;
      if (CENTRED) sums.at[0] += left;
      sums.at[SQUARES] = fmaf(left, left, sums.at[SQUARES]);
    }
  }
  return sums;
}

// A thread's weights.
struct Scales {
  Weights scale[VECTORS], shift[CENTRED ? VECTORS : 1];

  __device__ __forceinline__ void load_one(const WEFT_W* w, const WEFT_W* b, int i, int at) {
    scale[i] = reinterpret_cast<const Weights*>(w)[at];
    if (CENTRED) shift[CENTRED ? i : 0] = reinterpret_cast<const Weights*>(b)[at];
  }
  __device__ __forceinline__ void load(const WEFT_W* w, const WEFT_W* b, int first, int count) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (FULL || first + i * TEAM < count) load_one(w, b, i, first + i * TEAM);
  }
};

// Writes the rows, `y` their first, of which there are `left`. `scales` are loaded, or (LATE) are
// now from w and b. More registers a thread mean fewer rows under way: floats are made again.
template <bool LATE>
__device__ __forceinline__ void write_rows(Pack (&x)[ROWS][VECTORS], const float (&ref)[ROWS],
                                           const Whole (&whole)[ROWS], Scales& scales,
                                           const WEFT_W* w, const WEFT_W* b, WEFT_T* y,
                                           index_t columns, index_t left, int count) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (!FULL && at >= count) continue;
    if (LATE) scales.load_one(w, b, i, at);
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      if (k && k >= left) break;
      forget(x[k][i]);
      const float scale = whole[k].scale, less = -whole[k].shift * scale;
      Pack out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float off = to_float(x[k][i].at[j]) - ref[k];
        const float hat = CENTRED ? fmaf(off, scale, less) : off * scale;
        const float scaled = hat * to_float(scales.scale[i].at[j]);
        out.at[j] = from_float<WEFT_T>(
            CENTRED ? scaled + to_float(scales.shift[CENTRED ? i : 0].at[j]) : scaled);
      }
      reinterpret_cast<Pack*>(y + k * columns)[at] = out;
    }
  }
}
