// Step 1: a thread for each output, which loads C R S pixels and as many weights.
//
// Neighbouring lanes have neighbouring columns of one output channel. Bytes: 2 C R S loads for each output
// through the L1 cache.
#include "numeric.cuh"

constexpr int THREADS = 256;

// x: (images, channels, height, width) by strides; weight: (outputs, channels, kr, ks) contiguous; y:
// (images, outputs, rows, columns) contiguous.
extern "C" __global__ void conv2d(const WEFT_T* x, const WEFT_T* weight, WEFT_T* y, index_t images,
                                  index_t channels, index_t height, index_t width, index_t outputs,
                                  index_t rows, index_t columns, index_t padding, index_t kr, index_t ks,
                                  index_t image_stride, index_t channel_stride, index_t row_stride) {
  const index_t number = (index_t)blockIdx.x * THREADS + threadIdx.x;
  if (number >= images * outputs * rows * columns) return;
  const index_t column = number % columns, row = number / columns % rows;
  const index_t output = number / columns / rows % outputs;
  const WEFT_T* image = x + number / columns / rows / outputs * image_stride;
  float sum = 0.0f;
  for (index_t channel = 0; channel < channels; ++channel)
    for (index_t r = 0; r < kr; ++r)
      for (index_t s = 0; s < ks; ++s) {
        const index_t i = row + r - padding, j = column + s - padding;
        const bool inside = i >= 0 && i < height && j >= 0 && j < width;
        const float pixel = inside ? to_float(image[channel * channel_stride + i * row_stride + j]) : 0.0f;
        sum = fmaf(to_float(weight[((output * channels + channel) * kr + r) * ks + s]), pixel, sum);
      }
  y[number] = from_float<WEFT_T>(sum);
}
