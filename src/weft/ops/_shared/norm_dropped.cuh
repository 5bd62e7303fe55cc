// Dropout in the norms' kernels, whose x it leaves out some of (DROP): see philox_dropout.cuh.
//
// An access of 8 elements is one block of random words.
#pragma once
#include "norm.cuh"

#ifndef DROP
#define DROP 0
#endif

#if DROP
#include "philox_dropout.cuh"
#define AND_DROPOUT , index_t seed, index_t rule
#define DROPOUT Dropout{seed, rule}
#else
struct Dropout {
  template <int M>
  __device__ __forceinline__ void apply(float (&)[M], index_t) const {}
};
#define AND_DROPOUT
#define DROPOUT Dropout{}
#endif

// What is left of x, plus r, rounded to the dtype; x begins at element `first`.
__device__ __forceinline__ Pack added(const Pack& x, const Pack& r, const Dropout& dropout,
                                      index_t first) {
  float left[N];
  Pack s;
#pragma unroll
  for (int j = 0; j < N; ++j) left[j] = element(x, j);
  dropout.apply(left, first);
#pragma unroll
  for (int j = 0; j < N; ++j) s.at[j] = from_float<WEFT_T>(left[j] + element(r, j));
  return s;
}
