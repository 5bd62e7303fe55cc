// What the forward does with a row in registers: its warps' sums, and its answers.
#pragma once
#include "norm_merge.cuh"

// Where more registers a thread mean fewer rows under way.
#ifndef FORGET
#define FORGET 0
#endif

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

// Writes the row. `scales` are loaded, or (LATE) are now from w and b.
template <bool LATE>
__device__ __forceinline__ void write_row(Pack (&x)[VECTORS], float ref, const Whole& whole,
                                          Scales& scales, const WEFT_W* w, const WEFT_W* b,
                                          WEFT_T* y, int first, int count) {
  const float less = -whole.shift * whole.scale;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = first + i * TEAM;
    if (!FULL && at >= count) continue;
    if (LATE) scales.load_one(w, b, i, at);
    if (FORGET) forget(x[i]);
    Pack out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float left = to_float(x[i].at[j]) - ref;
      const float hat = CENTRED ? fmaf(left, whole.scale, less) : left * whole.scale;
      const float scaled = hat * to_float(scales.scale[i].at[j]);
      out.at[j] = from_float<WEFT_T>(
          CENTRED ? scaled + to_float(scales.shift[CENTRED ? i : 0].at[j]) : scaled);
    }
    reinterpret_cast<Pack*>(y)[at] = out;
  }
}
