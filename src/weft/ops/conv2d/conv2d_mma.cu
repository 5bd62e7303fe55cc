// Convolution as an implicit product by tensor cores: float16 and bfloat16, summed in float32.
//
// c (outputs x pixels) = a (outputs x channels) b (channels x pixels), added over the places of the window. A
// block has 64 output channels of a tile of 8 x 32 pixels; a warp one row of 32 pixels. For 16 channels at a
// time the tile of the image with its halo is in shared memory once, and serves all places of the window: the
// matrix b is never written. a comes from weights that are packed in the order of fragments.
// Bytes: the image once for each 64 outputs, from the L2 cache after the first; the output once.
#include "products/mma_ptx.cuh"
#include "tiles.cuh"

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int TALL = WARPS, WIDE = 32, OUT = 64, CHUNK = 16;
constexpr int MT = OUT / 16, NT = WIDE / 8;  // fragments of a warp
constexpr int HALO_TALL = TALL + KR - 1, HALO_WIDE = WIDE + KS - 1, PIXELS = HALO_TALL * HALO_WIDE;
// Words of a pixel: 8 of channel pairs and 4 of padding. The lanes of a load are 8 pixels by 4 words, which
// 12 words a pixel put into 32 different banks.
constexpr int PITCH = 12;

__device__ __forceinline__ unsigned two(WEFT_T low, WEFT_T high) {
  const WEFT_T both[2] = {low, high};
  unsigned word;
  memcpy(&word, both, sizeof(word));
  return word;
}

}  // namespace

// weight: (outputs, channels, KR, KS) contiguous; packed: (chunks, KR * KS, groups of 16 outputs, 32 lanes, 4
// words), zeros beyond the last channel and output. A thread writes the four words of a lane's fragment.
extern "C" __global__ void conv2d_pack(const WEFT_T* weight, unsigned* packed, index_t outputs,
                                       index_t channels, index_t groups, index_t fragments) {
  const index_t number = (index_t)blockIdx.x * THREADS + threadIdx.x;
  if (number >= fragments * 32) return;
  const int lane = (int)(number % 32);
  const index_t group = number / 32 % groups, place = number / 32 / groups % (KR * KS);
  const index_t chunk = number / 32 / groups / (KR * KS);
  for (int i = 0; i < 4; ++i) {
    // Words 1 and 3 are eight rows down, words 2 and 3 eight channels on.
    const index_t output = group * 16 + lane / 4 + i % 2 * 8;
    const index_t channel = chunk * CHUNK + lane % 4 * 2 + i / 2 * 8;
    WEFT_T pair[2];
    for (int j = 0; j < 2; ++j)
      pair[j] = output < outputs && channel + j < channels
                    ? weight[(output * channels + channel + j) * (KR * KS) + place]
                    : from_float<WEFT_T>(0.0f);
    packed[number * 4 + i] = two(pair[0], pair[1]);
  }
}

// x: images by strides; packed: as above; y: (images, outputs, rows, columns) contiguous.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
conv2d(const WEFT_T* __restrict__ x, const unsigned* __restrict__ packed, WEFT_T* __restrict__ y,
       index_t channels, index_t height, index_t width, index_t outputs, index_t rows, index_t columns,
       index_t padding, index_t image_stride, index_t channel_stride, index_t row_stride, index_t groups) {
  __shared__ unsigned words[PIXELS * PITCH];
  const Shapes s = {channels, height, width, outputs, rows, columns, padding, image_stride, channel_stride,
                    row_stride};
  const Tile tile(blockIdx.x, s, OUT, TALL, WIDE);
  const WEFT_T* image = x + tile.image * image_stride;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float acc[MT][NT][4] = {};
  for (index_t chunk = 0; chunk * CHUNK < channels; ++chunk) {
#pragma unroll 1
    for (int k = threadIdx.x; k < PIXELS * (CHUNK / 2); k += THREADS) {
      // Neighbouring lanes load neighbouring columns, of two channels each.
      const int at = k % PIXELS, pair = k / PIXELS;
      const index_t i = tile.row + at / HALO_WIDE, j = tile.column + at % HALO_WIDE;
      const index_t channel = chunk * CHUNK + pair * 2;
      words[at * PITCH + pair] = two(pixel(image, s, channel, i, j), pixel(image, s, channel + 1, i, j));
    }
    __syncthreads();
#pragma unroll 1  // the sums take half of the registers: addresses of several places would not fit
    for (int r = 0; r < KR; ++r)
#pragma unroll 1
      for (int c = 0; c < KS; ++c) {
        const index_t place = (chunk * KR + r) * KS + c;
        unsigned a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          // Groups beyond the last output are not packed: their rows stay unused.
          const index_t group = min(tile.output / 16 + m, groups - 1);
          const index_t at = ((place * groups + group) * 32 + lane) * 4;
          const uint4 in = *reinterpret_cast<const uint4*>(packed + at);
          a[m][0] = in.x, a[m][1] = in.y, a[m][2] = in.z, a[m][3] = in.w;
        }
        const unsigned* near = words + ((warp + r) * HALO_WIDE + c + lane / 4) * PITCH + lane % 4;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const unsigned b0 = near[n * 8 * PITCH], b1 = near[n * 8 * PITCH + 4];
#pragma unroll
          for (int m = 0; m < MT; ++m) multiply<WEFT_T>(acc[m][n], a[m], b0, b1);
        }
      }
    __syncthreads();  // the tile has been read before the next chunk overwrites it
  }
  const index_t i = tile.row + warp;
  if (i >= rows) return;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        // A fragment of the result: lane / 4 is the row within 8, lane % 4 * 2 the column.
        const index_t output = tile.output + m * 16 + k / 2 * 8 + lane / 4;
        const index_t j = tile.column + n * 8 + lane % 4 * 2 + k % 2;
        if (output < outputs && j < columns)
          y[((tile.image * outputs + output) * rows + i) * columns + j] = from_float<WEFT_T>(acc[m][n][k]);
      }
}
