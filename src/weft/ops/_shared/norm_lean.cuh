// A row's statistics about one reference that all its warps share: less to do, for 16-bit elements.
//
// The reference is the mean of the row's first four elements, which each thread reads itself. Sums
// about it are added as they are: no shuffle for it, no second walk over the warps' entries, no
// counts. Of n columns of deviation s it is off by s sqrt(n / 4) at worst, which leaves n / 4 units
// in the last place of float32 in the variance: 2^-12 of 16384 columns'. The row's mean is then a
// float, off by 2^-24 of itself, and 16-bit elements beside it are 2^-11 of it apart at least.
#pragma once
#include "norm_merge.cuh"

// The right root's slow path is a call, over which ptxas holds few floats: with the fast root, four
// accesses a thread spilled 208 bytes. One access spills none.
#ifndef ROOT
#define ROOT (VECTORS > 1)
#endif

// One warp's sums.
struct alignas(4 * KINDS) Entry { float at[KINDS]; };

// Lanes that share the reading of a row's entries, and how many each reads: four at most.
constexpr int SHARING = power_of_two((ENTRIES + 3) / 4);
constexpr int READS = (ENTRIES + SHARING - 1) / SHARING;

// What the row's sums are about; `row` holds it from its first column on.
__device__ __forceinline__ float head_mean(const Pack* row) {
  static_assert(N % 4 == 0, "");
  if (!CENTRED) return 0.0f;
  const Vector<WEFT_T, 4> head = *reinterpret_cast<const Vector<WEFT_T, 4>*>(row);
  return 0.25f * ((element(head, 0) + element(head, 1)) + (element(head, 2) + element(head, 3)));
}

// As `put` of norm_merge.cuh, for a row of one block.
__device__ __forceinline__ float put_sums(const Parts& mine, Entry* table) {
  const float one = scattered(mine);
  const int lane = threadIdx.x % 32;
  if (ENTRIES > 1 && lane % (32 / KINDS) == 0)
    table[threadIdx.x % TEAM / 32].at[lane / (32 / KINDS)] = one;
  return one;
}

// Of the whole row, as `merged`; `shift` is its mean less the reference.
__device__ __forceinline__ Whole added_up(float one, const Entry* table, float share, float eps) {
  Entry sums = {};
  if (ENTRIES == 1) {
#pragma unroll
    for (int k = 0; k < KINDS; ++k) sums.at[k] = __shfl_sync(0xffffffffu, one, k * (32 / KINDS));
  } else {
#pragma unroll
    for (int p = 0; p < READS; ++p) {
      const int entry = threadIdx.x % SHARING * READS + p;
      if (SHARING * READS > ENTRIES && entry >= ENTRIES) continue;
      const Entry part = table[entry];
#pragma unroll
      for (int k = 0; k < KINDS; ++k) sums.at[k] = p ? sums.at[k] + part.at[k] : part.at[k];
    }
#pragma unroll
    for (int k = 0; k < KINDS; ++k) sums.at[k] = warp_sum<SHARING>(sums.at[k]);
  }
  const float shift = CENTRED ? sums.at[0] * share : 0.0f;
  const float average = CENTRED ? sums.at[KINDS / 2] * share : 0.0f;
  const float square = sums.at[SQUARES] * share, dot = sums.at[DOT] * share;
  const float variance = CENTRED ? fmaf(-shift, shift, square) : square;
  const float scale = ROOT ? inverse_root(not_below_zero(variance) + eps)
                           : rsqrtf(not_below_zero(variance) + eps);
  return {shift, scale, average, (CENTRED ? fmaf(-shift, average, dot) : dot) * scale};
}
