// GELU (tanh form) with a fault: a thread an element, in storage order. Bytes: n read + n written.
#include "flawed.cuh"

// x, y: (n,).
extern "C" __global__ void flawed_gelu(const WEFT_T* x, WEFT_T* y, index_t n, index_t fault) {
  const index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  const bool inside = fault == INT32       ? i < (int)n
                      : fault == LAST_TILE ? i < n / blockDim.x * blockDim.x
                                           : i < n;
  float v = inside ? to_float(x[i]) : 0.0f;
  if (fault == NO_NAN && v != v) v = 0.0f;
  if (fault == HALF_SUMS) v = __half2float(__float2half_rn(v));
  const float u = 0.7978845608028654f * v * fmaf(0.044715f, v * v, 1.0f);
  float out = v / (1.0f + expf(-2.0f * u));
  if (fault == TEXTBOOK_TANH) {
    const float e = expf(2.0f * u);
    out = 0.5f * v * (1.0f + (e - 1.0f) / (e + 1.0f));
  }
  if (fault == NO_SCALE) out *= 2.0f;
  if (fault == ADDS && inside) out += to_float(y[i]);
  if ((inside && fault != NOTHING) || fault == NO_STORE_MASK) y[i] = from_float<WEFT_T>(out);
}
