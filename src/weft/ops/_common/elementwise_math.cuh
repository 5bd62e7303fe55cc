// Activations and their slopes in float32.
//
// exp2 and the reciprocal come from the special function unit (SFU), with an error of at most 2 ulp each.
#pragma once

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// An error of at most 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else  // for emulators
inline float exp2_approx(float x) { return exp2f(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float tanh_approx(float x) { return tanhf(x); }
#endif

// Returns exp(-z); inf for z far below 0.
__device__ __forceinline__ float exp_minus(float z) {
  return exp2_approx(-1.4426950408889634f * z);  // -log2(e) z
}

// Returns sigmoid(z) from e = exp(-z); 0 for e = inf.
__device__ __forceinline__ float sigmoid(float e) {
  return reciprocal_approx(1.0f + e);
}

// Returns 1 - sigmoid(z). The subtraction loses its digits where s is near 1; e s is exact there.
__device__ __forceinline__ float one_minus(float s, float e) { return s < 0.5f ? 1.0f - s : e * s; }

// An activation x s and its slope, both from one exponential.
struct Activated { float value, slope; };

__device__ __forceinline__ Activated silu(float x) {
  const float e = exp_minus(x), s = sigmoid(e);
  return {x * s, s * fmaf(x, one_minus(s, e), 1.0f)};
}

// GELU in its tanh form, computed as x sigmoid(2u): the form (e^2u - 1) / (e^2u + 1) of tanh is inf / inf =
// NaN above x = 10.07. The constants are 2 sqrt(2/pi), 0.044715 and 3 * 0.044715.
__device__ __forceinline__ Activated gelu(float x) {
  const float z = 1.5957691216057308f * x * fmaf(0.044715f, x * x, 1.0f);
  const float e = exp_minus(z), s = sigmoid(e);
  // x^2 stays finite: where the slope is 0 or 1, inf would give 0 * inf = NaN.
  const float inner = 1.5957691216057308f * fmaf(0.134145f, fminf(x * x, 1e30f), 1.0f);
  return {x * s, fmaf(x * s * one_minus(s, e), inner, s)};
}

// GELU in its tanh form by one operation of the SFU. The error of 2^-11 x costs digits where y is near 0 on
// the negative side.
__device__ __forceinline__ float gelu_by_tanh(float x) {
  const float half = 0.5f * x;
  return fmaf(half, tanh_approx(0.7978845608028654f * x * fmaf(0.044715f, x * x, 1.0f)), half);
}
