// Step 3: a tile of a row and its halo in shared memory.
//
// A block loads a tile and the TAPS-1 elements before it, neighbouring lanes neighbouring elements, and reads
// each TAPS times from shared memory. Bytes: n read and n written, one element an access, and a barrier
// between loads and sums.
#include "numeric.cuh"

#ifndef TAPS
#define TAPS 4
#endif

constexpr int TILE = 1024;

// x: (batches, channels, length), sequences at batch_stride and rows at row_stride elements; weight:
// (channels, TAPS); bias: (channels,); y: (batches, channels, length) contiguous. A block for each tile.
extern "C" __global__ void conv1d(const WEFT_T* x, const WEFT_T* weight, const WEFT_T* bias, WEFT_T* y,
                                  index_t batches, index_t channels, index_t length, index_t batch_stride,
                                  index_t row_stride) {
  __shared__ float tile[TILE + TAPS - 1];
  const index_t across = (length + TILE - 1) / TILE, line = blockIdx.x / across;
  const index_t channel = line % channels, first = blockIdx.x % across * TILE;
  const WEFT_T* row = x + line / channels * batch_stride + channel * row_stride;
  for (int i = threadIdx.x; i < TILE + TAPS - 1; i += blockDim.x) {
    const index_t from = first - (TAPS - 1) + i;
    tile[i] = from >= 0 && from < length ? to_float(row[from]) : 0.0f;
  }
  float w[TAPS];
#pragma unroll
  for (int k = 0; k < TAPS; ++k) w[k] = to_float(weight[channel * TAPS + k]);
  const float constant = to_float(bias[channel]);
  __syncthreads();
  for (int i = threadIdx.x; i < TILE && first + i < length; i += blockDim.x) {
    float sum = constant;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) sum = fmaf(w[k], tile[i + k], sum);
    y[line * length + first + i] = from_float<WEFT_T>(sum);
  }
}
