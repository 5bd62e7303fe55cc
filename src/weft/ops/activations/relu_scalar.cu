// ReLU with one element for each thread: step 1 of the ladder. A warp's access has 64 bytes in bf16; relu.cu
// has 512.
//
// The bytes are those of relu.cu, in bf16 in eight times as many instructions and threads.
// Bytes: n read + n written (backward: 2n read + n written). `v <= 0` is false for NaN, so that NaN
// propagates.
#include "numeric.cuh"

// x, y: (n,) in storage order.
extern "C" __global__ void relu_forward_scalar(const WEFT_T* x, WEFT_T* y, index_t n) {
  const index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float v = to_float(x[i]);
  y[i] = from_float<WEFT_T>(v <= 0.0f ? 0.0f : v);
}

// grad, y, dx: (n,).
extern "C" __global__ void relu_backward_scalar(const WEFT_T* grad, const WEFT_T* y, WEFT_T* dx,
                                                index_t n) {
  const index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  dx[i] = from_float<WEFT_T>(to_float(y[i]) <= 0.0f ? 0.0f : to_float(grad[i]));
}
