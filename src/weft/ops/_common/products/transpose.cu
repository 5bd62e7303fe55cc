// y (columns, rows) = the transpose of x (rows, columns), float32: an operand of a tf32 product that is contiguous
// across K, which wgmma takes along K only.
//
// A block moves a tile of 64 x 64 through shared memory, 16 bytes an access where x allows it. At 8192^3 this
// reads and writes 268 MB, 0.13 ms at 4.2 TB/s: 5 % of a product at 416 TFLOP/s.
#include "numeric.cuh"

constexpr int TILE = 64, THREADS = 256, PITCH = TILE + 1;  // the odd pitch: columns are in different banks

struct TransposeArguments {
  const float* x;  // rows at x_pitch elements
  float* y;        // 16-byte aligned; rows at y_pitch, a multiple of 4 and at least `rows`
  long long rows, columns, x_pitch, y_pitch;
  int wide;        // rows of x are aligned to 16 bytes
};

extern "C" __global__ void __launch_bounds__(THREADS) transpose(const TransposeArguments arguments) {
  __shared__ float tile[TILE * PITCH];  // [column][row]
  const long long column_tiles = (arguments.columns + TILE - 1) / TILE;
  const long long first_row = blockIdx.x / column_tiles * TILE, first_column = blockIdx.x % column_tiles * TILE;
  // A thread has four adjacent elements in each of four rows, 16 apart.
  const int along = threadIdx.x % 16 * 4, across = threadIdx.x / 16;
  Vector<float, 4> fours[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const long long row = first_row + across + i * 16, column = first_column + along;
    const float* from = arguments.x + row * arguments.x_pitch + column;
    if (row >= arguments.rows) continue;
    if (arguments.wide && column + 4 <= arguments.columns) {
      fours[i] = *reinterpret_cast<const Vector<float, 4>*>(from);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (column + j < arguments.columns) fours[i].at[j] = from[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) tile[(along + j) * PITCH + across + i * 16] = fours[i].at[j];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const long long row = first_column + across + i * 16, column = first_row + along;  // of y
    if (row >= arguments.columns || column >= arguments.y_pitch) continue;
    Vector<float, 4> four;
#pragma unroll
    for (int j = 0; j < 4; ++j) four.at[j] = tile[(across + i * 16) * PITCH + along + j];
    *reinterpret_cast<Vector<float, 4>*>(arguments.y + row * arguments.y_pitch + column) = four;
  }
}
