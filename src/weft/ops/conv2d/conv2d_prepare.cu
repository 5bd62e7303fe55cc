// What conv2d_wgmma.cu multiplies: images and weights with adjacent channels, in one launch.
//
// Images: a thread has 8 channels of 8 pixels. It loads 16 bytes of each channel, transposes them in
// registers, one instruction for each two elements, and stores 16 bytes of each pixel. A warp has 64 channels
// of 32 pixels (fewer channels: more pixels), so that it reads 64 adjacent bytes and writes 128.
// Weights: a thread for each output and channel. Bytes: each element is read once and written once.
#include "numeric.cuh"

using T = WEFT_T;

constexpr int THREADS = 256, SIDE = 8;  // SIDE: channels and pixels of a thread

#ifndef WEFT_CONV2D_PTX  // which an emulator defines
__device__ __forceinline__ void store_16(void* to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
#endif

struct PrepareArguments {
  const T* x;       // (images, channels, height, width) by strides, columns adjacent
  T* to;            // (images, height, width, padded) contiguous, 16-byte aligned; zeros from `channels` on
  const T* weight;  // (outputs, channels, places) contiguous
  T* packed;        // (places, outputs, padded); zeros from `channels` on
  index_t image_stride, channel_stride, row_stride;
  int images, channels, padded, height, width, outputs, places;
  int image_blocks;    // blocks of the images; the others have weights
  int channel_lanes;   // lanes of a warp along channels: 1, 2, 4 or 8
  int channel_tiles, pixel_tiles;  // of a warp
  int wide;            // pixels of an image are adjacent, and each 8 are 16 aligned bytes
};

__device__ __forceinline__ void turn_images(const PrepareArguments& a) {
  const unsigned warp = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned pixel_tile = warp % a.pixel_tiles, rest = warp / a.pixel_tiles;
  const int channel = (rest % a.channel_tiles * a.channel_lanes + lane % a.channel_lanes) * SIDE;
  const index_t image = rest / a.channel_tiles, area = (index_t)a.height * a.width;
  const index_t first = ((index_t)pixel_tile * (32 / a.channel_lanes) + lane / a.channel_lanes) * SIDE;
  if (image >= a.images || channel >= a.padded || first >= area) return;
  int lines[SIDE], columns[SIDE];  // of the pixels, unless adjacent; those beyond the end repeat the last one
  if (!a.wide) {
    int row = (int)(first / a.width), column = (int)(first % a.width);
#pragma unroll
    for (int p = 0; p < SIDE; ++p) {
      lines[p] = row, columns[p] = column;
      if (first + p + 1 < area && ++column == a.width) column = 0, ++row;
    }
  }
  unsigned in[SIDE][SIDE / 2];  // pairs of pixels of each channel
#pragma unroll
  for (int c = 0; c < SIDE; ++c) {
    uint4 v = make_uint4(0, 0, 0, 0);
    const T* from = a.x + image * a.image_stride + (channel + c) * a.channel_stride;
    if (channel + c < a.channels) {
      if (a.wide) {
        v = *reinterpret_cast<const uint4*>(from + first);
      } else {
        T elements[SIDE];
#pragma unroll
        for (int p = 0; p < SIDE; ++p) elements[p] = from[lines[p] * a.row_stride + columns[p]];
        memcpy(&v, elements, 16);
      }
    }
    in[c][0] = v.x, in[c][1] = v.y, in[c][2] = v.z, in[c][3] = v.w;
  }
#pragma unroll
  for (int p = 0; p < SIDE; ++p) {
    unsigned out[SIDE / 2];
#pragma unroll
    for (int c = 0; c < SIDE / 2; ++c)
      out[c] = __byte_perm(in[c * 2][p / 2], in[c * 2 + 1][p / 2], p % 2 ? 0x7632 : 0x5410);
    if (first + p < area)
      store_16(a.to + (image * area + first + p) * a.padded + channel,
               make_uint4(out[0], out[1], out[2], out[3]));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) conv2d_prepare(const PrepareArguments a) {
  if (blockIdx.x < (unsigned)a.image_blocks) return turn_images(a);
  const index_t thread = (index_t)(blockIdx.x - a.image_blocks) * THREADS + threadIdx.x;
  const index_t output = thread / a.padded;
  const int channel = (int)(thread % a.padded);
  if (output >= a.outputs) return;
#pragma unroll 1
  for (int place = 0; place < a.places; ++place) {
    const T value = channel < a.channels ? a.weight[(output * a.channels + channel) * a.places + place]
                                         : from_float<T>(0.0f);
    a.packed[((index_t)place * a.outputs + output) * a.padded + channel] = value;
  }
}
