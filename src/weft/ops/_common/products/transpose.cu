// y (columns, rows) = the transpose of x (rows, columns): an operand of a product that is contiguous across
// K, for a program that takes it along K only.
//
// A block moves a tile of 64 x 64 through shared memory, 16 bytes an access where x allows it. At 8192^3 this
// reads and writes 268 MB of float32, 0.13 ms at 4.2 TB/s: 5 % of a tf32 product at 416 TFLOP/s.
#include "numeric.cuh"

using T = WEFT_T;

constexpr int TILE = 64, THREADS = 256, WIDTH = Wide<T>::N;  // WIDTH: elements of an access
constexpr int ROWS_AT_ONCE = THREADS * WIDTH / TILE, STEPS = TILE / ROWS_AT_ONCE;
constexpr int PITCH = TILE + 4 / sizeof(T);  // an odd number of words: columns are in different banks

struct TransposeArguments {
  const T* x;  // rows at x_pitch elements
  T* y;        // 16-byte aligned; rows at y_pitch, the next multiple of 16 bytes from `rows` on
  long long rows, columns, x_pitch, y_pitch;
  int wide;    // rows of x are aligned to 16 bytes
};

extern "C" __global__ void __launch_bounds__(THREADS) transpose(const TransposeArguments arguments) {
  __shared__ T tile[TILE * PITCH];  // [column][row]
  const long long column_tiles = (arguments.columns + TILE - 1) / TILE;
  const long long first_row = blockIdx.x / column_tiles * TILE;
  const long long first_column = blockIdx.x % column_tiles * TILE;
  // A thread has WIDTH adjacent elements in each of STEPS rows.
  const int along = threadIdx.x % (TILE / WIDTH) * WIDTH, across = threadIdx.x / (TILE / WIDTH);
  Vector<T, WIDTH> vectors[STEPS] = {};
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const long long row = first_row + across + i * ROWS_AT_ONCE, column = first_column + along;
    const T* from = arguments.x + row * arguments.x_pitch + column;
    if (row >= arguments.rows) continue;
    if (arguments.wide && column + WIDTH <= arguments.columns) {
      vectors[i] = *reinterpret_cast<const Vector<T, WIDTH>*>(from);
    } else {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j)
        if (column + j < arguments.columns) vectors[i].at[j] = from[j];
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) tile[(along + j) * PITCH + across + i * ROWS_AT_ONCE] = vectors[i].at[j];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int in_tile = across + i * ROWS_AT_ONCE;
    const long long row = first_column + in_tile, column = first_row + along;  // of y
    if (row >= arguments.columns || column >= arguments.y_pitch) continue;
    Vector<T, WIDTH> vector;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) vector.at[j] = tile[in_tile * PITCH + along + j];
    *reinterpret_cast<Vector<T, WIDTH>*>(arguments.y + row * arguments.y_pitch + column) = vector;
  }
}
