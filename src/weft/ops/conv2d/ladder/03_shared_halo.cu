// Step 3: a channel's tile of 16 x 16 pixels and its halo in shared memory, 8 output channels a thread.
//
// A pixel is loaded once for a block and read R S times from shared memory. Bytes: the image once for each 8
// outputs and its halo; a barrier for each channel.
#include "numeric.cuh"

constexpr int THREADS = 256, OUT = 8, SIDE = 16, MAX_SIDE = 11, WIDE = SIDE + MAX_SIDE - 1;

// x: (images, channels, height, width) by strides; weight: (outputs, channels, kr, ks) contiguous, kr and ks
// at most MAX_SIDE; y: (images, outputs, rows, columns) contiguous.
extern "C" __global__ void conv2d(const WEFT_T* x, const WEFT_T* weight, WEFT_T* y, index_t images,
                                  index_t channels, index_t height, index_t width, index_t outputs,
                                  index_t rows, index_t columns, index_t padding, index_t kr, index_t ks,
                                  index_t image_stride, index_t channel_stride, index_t row_stride) {
  __shared__ float tile[WIDE][WIDE];
  const index_t groups = (outputs + OUT - 1) / OUT, across = (columns + SIDE - 1) / SIDE;
  const index_t down = (rows + SIDE - 1) / SIDE, pixels = blockIdx.x / groups;
  const index_t first = blockIdx.x % groups * OUT, picture = pixels / across / down;
  const index_t row0 = pixels / across % down * SIDE, column0 = pixels % across * SIDE;
  const int right = threadIdx.x % SIDE, below = threadIdx.x / SIDE;
  const int tall = SIDE + (int)kr - 1, wide = SIDE + (int)ks - 1;
  float sums[OUT] = {};
  for (index_t channel = 0; channel < channels; ++channel) {
    const WEFT_T* image = x + picture * image_stride + channel * channel_stride;
    for (int k = threadIdx.x; k < tall * wide; k += THREADS) {
      const index_t i = row0 + k / wide - padding, j = column0 + k % wide - padding;
      const bool inside = i >= 0 && i < height && j >= 0 && j < width;
      tile[k / wide][k % wide] = inside ? to_float(image[i * row_stride + j]) : 0.0f;
    }
    __syncthreads();
    for (int r = 0; r < kr; ++r)
      for (int s = 0; s < ks; ++s)
#pragma unroll
        for (int o = 0; o < OUT; ++o) {
          const index_t output = min(first + o, outputs - 1);
          const float w = to_float(weight[((output * channels + channel) * kr + r) * ks + s]);
          sums[o] = fmaf(w, tile[below + r][right + s], sums[o]);
        }
    __syncthreads();  // the tile has been read before the next channel overwrites it
  }
  const index_t row = row0 + below, column = column0 + right;
#pragma unroll
  for (int o = 0; o < OUT; ++o)
    if (first + o < outputs && row < rows && column < columns)
      y[((picture * outputs + first + o) * rows + row) * columns + column] = from_float<WEFT_T>(sums[o]);
}
