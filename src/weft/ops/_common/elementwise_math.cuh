// Activations and their slopes in float32.
//
// exp2 and the reciprocal come from the special function unit (SFU), with an error of at most 2 ulp each.
#pragma once

// Returns exp(-z); inf for z far below 0.
__device__ __forceinline__ float exp_minus(float z) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * z));  // -log2(e) z
  return e;
}

// Returns sigmoid(z) from e = exp(-z); 0 for e = inf.
__device__ __forceinline__ float sigmoid(float e) {
  float s;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
  return s;
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
