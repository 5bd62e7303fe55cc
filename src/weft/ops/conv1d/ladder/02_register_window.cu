// Step 2: coefficients and a sliding window in registers.
//
// A thread has 16 outputs of one row one after another: it loads the channel's coefficients once, and each
// element once but for those before its first. The lanes of a warp are 16 elements apart, so that each load
// touches a sector of 32 bytes for one element; the L1 cache holds the line for the next ones.
#include "numeric.cuh"

#ifndef TAPS
#define TAPS 4
#endif

constexpr int OUTPUTS = 16;

// x: (batches, channels, length), sequences at batch_stride and rows at row_stride elements; weight:
// (channels, TAPS); bias: (channels,); y: (batches, channels, length) contiguous.
extern "C" __global__ void conv1d(const WEFT_T* x, const WEFT_T* weight, const WEFT_T* bias, WEFT_T* y,
                                  index_t batches, index_t channels, index_t length, index_t batch_stride,
                                  index_t row_stride) {
  const index_t number = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  const index_t across = (length + OUTPUTS - 1) / OUTPUTS, line = number / across;
  if (line >= batches * channels) return;
  const index_t channel = line % channels, first = number % across * OUTPUTS;
  const WEFT_T* row = x + line / channels * batch_stride + channel * row_stride;
  float w[TAPS], window[TAPS];
#pragma unroll
  for (int k = 0; k < TAPS; ++k) {
    w[k] = to_float(weight[channel * TAPS + k]);
    const index_t from = first - TAPS + k;  // the window before the first output: shifted by one below
    window[k] = from >= 0 ? to_float(row[from]) : 0.0f;
  }
  const float constant = to_float(bias[channel]);
  for (index_t t = first; t < min(first + OUTPUTS, length); ++t) {
#pragma unroll
    for (int k = 0; k + 1 < TAPS; ++k) window[k] = window[k + 1];
    window[TAPS - 1] = to_float(row[t]);
    float sum = constant;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) sum = fmaf(w[k], window[k], sum);
    y[line * length + t] = from_float<WEFT_T>(sum);
  }
}
