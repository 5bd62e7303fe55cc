// Shared by the ladder's steps: conversion of elements, and the type of short sums.
//
// Every step adds the elements of one block in Short (float; double for double) and writes the block's sum as
// a double. The host runs the step again on these sums until one is left.
#pragma once
#include "numeric.cuh"
#include "reduce.cuh"

__device__ __forceinline__ double widen(double v) { return v; }
template <typename T> __device__ __forceinline__ float widen(T v) { return to_float(v); }
using Short = decltype(widen(WEFT_T()));

struct AddShort {
  static __device__ __forceinline__ Short nothing() { return 0; }
  static __device__ __forceinline__ Short merge(Short a, Short b) { return a + b; }
};
