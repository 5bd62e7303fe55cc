// Step 1: a thread for each output, which loads K elements and K coefficients.
//
// The caches serve all loads but one. Bytes: n read and n written at best; 2 TAPS n through the L1 cache.
#include "numeric.cuh"

#ifndef TAPS
#define TAPS 4
#endif

// x: (batches, channels, length), sequences at batch_stride and rows at row_stride elements; weight:
// (channels, TAPS); bias: (channels,); y: (batches, channels, length) contiguous.
extern "C" __global__ void conv1d(const WEFT_T* x, const WEFT_T* weight, const WEFT_T* bias, WEFT_T* y,
                                  index_t batches, index_t channels, index_t length, index_t batch_stride,
                                  index_t row_stride) {
  const index_t number = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (number >= batches * channels * length) return;
  const index_t t = number % length, channel = number / length % channels;
  const WEFT_T* row = x + number / length / channels * batch_stride + channel * row_stride;
  float sum = to_float(bias[channel]);
  for (int k = 0; k < TAPS; ++k) {
    const index_t from = t - (TAPS - 1) + k;
    const float element = from >= 0 ? to_float(row[from]) : 0.0f;
    sum = fmaf(to_float(weight[channel * TAPS + k]), element, sum);
  }
  y[number] = from_float<WEFT_T>(sum);
}
