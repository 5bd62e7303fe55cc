// Activations in float32: exp2 and reciprocal from the special-function unit, 2 ulp at most each.
#pragma once

// exp(-z), which is inf for z far below 0.
__device__ __forceinline__ float exp_minus(float z) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * z));
  return e;
}

// sigmoid(z) of e = exp(-z); 0 where e is inf.
__device__ __forceinline__ float sigmoid(float e) {
  float s;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
  return s;
}

// 1 - s loses its digits where s nears 1; there e s has them all.
__device__ __forceinline__ float one_minus(float s, float e) { return s < 0.5f ? 1.0f - s : e * s; }

// An activation's value x s, and its slope, from one exponential.
struct Activated { float value, slope; };

__device__ __forceinline__ Activated silu(float x) {
  const float e = exp_minus(x), s = sigmoid(e);
  return {x * s, s * fmaf(x, one_minus(s, e), 1.0f)};
}

// GELU, tanh form, as x sigmoid(2u): tanh's (e^2u - 1) / (e^2u + 1) is NaN above x = 10.07.
__device__ __forceinline__ Activated gelu(float x) {
  const float z = 1.5957691216057308f * x * fmaf(0.044715f, x * x, 1.0f);
  const float e = exp_minus(z), s = sigmoid(e);
  // x^2 is held finite so that 0 * inf makes no NaN of a gradient that is plainly 0 or 1.
  const float inner = 1.5957691216057308f * fmaf(0.134145f, fminf(x * x, 1e30f), 1.0f);
  return {x * s, fmaf(x * s * one_minus(s, e), inner, s)};
}
