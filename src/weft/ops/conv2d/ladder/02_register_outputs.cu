// Step 2: a thread has 8 output channels of one pixel in registers.
//
// Each pixel that is loaded serves 8 sums. The weights of a place are the same for all lanes, one load for
// the whole warp. Bytes: 1.1 C R S loads for each output.
#include "numeric.cuh"

constexpr int THREADS = 256, OUT = 8;

// x: (images, channels, height, width) by strides; weight: (outputs, channels, kr, ks) contiguous; y:
// (images, outputs, rows, columns) contiguous.
extern "C" __global__ void conv2d(const WEFT_T* x, const WEFT_T* weight, WEFT_T* y, index_t images,
                                  index_t channels, index_t height, index_t width, index_t outputs,
                                  index_t rows, index_t columns, index_t padding, index_t kr, index_t ks,
                                  index_t image_stride, index_t channel_stride, index_t row_stride) {
  const index_t number = (index_t)blockIdx.x * THREADS + threadIdx.x, groups = (outputs + OUT - 1) / OUT;
  if (number >= images * groups * rows * columns) return;
  const index_t column = number % columns, row = number / columns % rows;
  const index_t first = number / columns / rows % groups * OUT, picture = number / columns / rows / groups;
  const WEFT_T* image = x + picture * image_stride;
  float sums[OUT] = {};
  for (index_t channel = 0; channel < channels; ++channel)
    for (index_t r = 0; r < kr; ++r)
      for (index_t s = 0; s < ks; ++s) {
        const index_t i = row + r - padding, j = column + s - padding;
        const bool inside = i >= 0 && i < height && j >= 0 && j < width;
        const float pixel = inside ? to_float(image[channel * channel_stride + i * row_stride + j]) : 0.0f;
#pragma unroll
        for (int o = 0; o < OUT; ++o) {
          // Beyond the last output the last one's weights are read; the sum is not stored.
          const index_t output = min(first + o, outputs - 1);
          sums[o] = fmaf(to_float(weight[((output * channels + channel) * kr + r) * ks + s]), pixel, sums[o]);
        }
      }
#pragma unroll
  for (int o = 0; o < OUT; ++o)
    if (first + o < outputs)
      y[((picture * outputs + first + o) * rows + row) * columns + column] = from_float<WEFT_T>(sums[o]);
}
