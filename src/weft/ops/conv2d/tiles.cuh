// Tiles of the convolution: which pixels and output channels a block has, and pixels of the padded image.
#pragma once
#include "numeric.cuh"

#ifndef KR
#define KR 3  // rows of the window
#endif
#ifndef KS
#define KS 3  // columns of the window
#endif

// Shapes of a call. The image has strides; its columns are adjacent. `up` is the padding.
struct Shapes {
  index_t channels, height, width, outputs, rows, columns, up, image_stride, channel_stride, row_stride;
};

// A block's image, its first output channel, and its first row and column of the output. Blocks of one tile
// of pixels and different outputs are neighbours: they share the image in the L2 cache.
struct Tile {
  index_t image, output, row, column;
  __device__ __forceinline__ Tile(index_t number, const Shapes& s, int out, int tall, int wide) {
    const index_t groups = (s.outputs + out - 1) / out;
    const index_t down = (s.rows + tall - 1) / tall, across = (s.columns + wide - 1) / wide;
    output = number % groups * out;
    number /= groups;
    column = number % across * wide;
    row = number / across % down * tall;
    image = number / across / down;
  }
};

// Returns the pixel of a channel at row i and column j of the padded image; 0 outside the image.
__device__ __forceinline__ WEFT_T pixel(const WEFT_T* image, const Shapes& s, index_t channel, index_t i,
                                        index_t j) {
  const index_t y = i - s.up, x = j - s.up;
  const bool inside = channel < s.channels && y >= 0 && y < s.height && x >= 0 && x < s.width;
  return inside ? image[channel * s.channel_stride + y * s.row_stride + x] : from_float<WEFT_T>(0.0f);
}
