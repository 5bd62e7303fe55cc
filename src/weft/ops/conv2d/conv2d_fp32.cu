// Convolution in float32 by registers, without tensor cores.
//
// A block has 8 output channels of a tile of 32 x 32 pixels, a thread 4 rows of one column of all 8: 32 sums.
// For 4 channels at a time the tile of the image with its halo and the weights are in shared memory. A thread
// loads the KR + 3 pixels of a column once for all its rows of the window.
// Bytes: the image once for each 8 outputs, from the L2 cache after the first; the output once.
#include "tiles.cuh"

constexpr int THREADS = 256, TALL = 32, WIDE = 32, OUT = 8, CHUNK = 4;
constexpr int EACH = TALL * WIDE / THREADS;  // rows of a thread
constexpr int HALO_TALL = TALL + KR - 1, HALO_WIDE = WIDE + KS - 1, PIXELS = HALO_TALL * HALO_WIDE;
constexpr int PLACES = KR * KS;

// x: images by strides; weight: (outputs, channels, KR, KS) contiguous; y: (images, outputs, rows, columns)
// contiguous.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
conv2d(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ weight, WEFT_T* __restrict__ y,
       index_t channels, index_t height, index_t width, index_t outputs, index_t rows, index_t columns,
       index_t padding, index_t image_stride, index_t channel_stride, index_t row_stride) {
  __shared__ float pixels[CHUNK * PIXELS];
  __shared__ float weights[CHUNK * PLACES * OUT];  // outputs innermost: all lanes read one word of each
  const Shapes s = {channels, height, width, outputs, rows, columns, padding, image_stride, channel_stride,
                    row_stride};
  const Tile tile(blockIdx.x, s, OUT, TALL, WIDE);
  const WEFT_T* image = x + tile.image * image_stride;
  const int right = threadIdx.x % WIDE, down = threadIdx.x / WIDE * EACH;
  float acc[EACH][OUT] = {};
  for (index_t first = 0; first < channels; first += CHUNK) {
    for (int k = threadIdx.x; k < CHUNK * PIXELS; k += THREADS) {
      const int at = k % PIXELS;
      pixels[k] = to_float(pixel(image, s, first + k / PIXELS, tile.row + at / HALO_WIDE,
                                 tile.column + at % HALO_WIDE));
    }
    for (int k = threadIdx.x; k < CHUNK * PLACES * OUT; k += THREADS) {
      const index_t output = tile.output + k % OUT, channel = first + k / OUT / PLACES;
      const bool exists = output < outputs && channel < channels;
      const index_t at = (output * channels + channel) * PLACES + k / OUT % PLACES;
      weights[k] = exists ? to_float(weight[at]) : 0.0f;
    }
    __syncthreads();
    for (int channel = 0; channel < CHUNK; ++channel)
      for (int c = 0; c < KS; ++c) {
        float column[EACH + KR - 1];
#pragma unroll
        for (int i = 0; i < EACH + KR - 1; ++i)
          column[i] = pixels[channel * PIXELS + (down + i) * HALO_WIDE + right + c];
#pragma unroll
        for (int r = 0; r < KR; ++r)
#pragma unroll
          for (int o = 0; o < OUT; ++o) {
            const float w = weights[((channel * KR + r) * KS + c) * OUT + o];
#pragma unroll
            for (int i = 0; i < EACH; ++i) acc[i][o] = fmaf(w, column[i + r], acc[i][o]);
          }
      }
    __syncthreads();  // the tile has been read before the next chunk overwrites it
  }
#pragma unroll
  for (int o = 0; o < OUT; ++o)
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const index_t output = tile.output + o, row = tile.row + down + i, column = tile.column + right;
      if (output < outputs && row < rows && column < columns)
        y[((tile.image * outputs + output) * rows + row) * columns + column] = from_float<WEFT_T>(acc[i][o]);
    }
}
