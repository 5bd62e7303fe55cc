// Three kernels and the host code that launches them. The file includes no header of PyTorch, so nvcc
// takes seconds, and the file can be compiled, profiled and sanitized by itself.
//
// Each launcher returns the CUDA runtime's status of the launch; csrc/binding.cpp raises an error from
// it. A launch is asynchronous: a fault inside the kernel appears at a later call.
#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace tiles_kernels {
namespace {

// Blocks for n elements, `each` of them in a block, rounded up: n / each would leave the last
// n % each elements without a thread, and their outputs uninitialised.
__host__ __device__ constexpr int64_t blocks_for(int64_t n, int64_t each) {
  return (n + each - 1) / each;
}

// ---- relu: y[i] = max(x[i], 0)
//
// x, y: n floats. The first 4 * vectors are loaded and stored as float4, 16 bytes at a time; the
// remaining n - 4 * vectors are processed one by one. Moves 8 n bytes.

constexpr int RELU_THREADS = 256;
constexpr int64_t RELU_BLOCKS = 1 << 20;  // for more work, the threads loop (grid-stride loop)

// NaN stays NaN, as in torch.relu: fmaxf(NaN, 0) would be 0.
__device__ float positive(float value) { return value <= 0.0f ? 0.0f : value; }

__global__ void relu_float4(const float* __restrict__ x, float* __restrict__ y, int64_t n,
                            int64_t vectors) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = first; i < vectors; i += step) {
    float4 four = reinterpret_cast<const float4*>(x)[i];
    four.x = positive(four.x);
    four.y = positive(four.y);
    four.z = positive(four.z);
    four.w = positive(four.w);
    reinterpret_cast<float4*>(y)[i] = four;
  }
  for (int64_t i = 4 * vectors + first; i < n; i += step) {
    y[i] = positive(x[i]);
  }
}

bool takes_float4(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(float4) == 0;
}

// ---- add: out[r, c] = a[r, c] + b[r, c]
//
// out: rows x columns floats, row-major. a and b have any strides, so a transposed or an expanded tensor
// needs no copy. A block covers 8 rows of 32 columns, one element for each thread; the rows are a
// grid-stride loop. Moves 12 bytes an element.

constexpr int ADD_COLUMNS = 32;
constexpr int ADD_ROWS = 8;
constexpr int64_t GRID_Y = 65535;  // CUDA's limit of blocks in y

struct Strides {
  int64_t row, column;  // elements from one row, and one column, to the next
};

__global__ void add_2d(const float* __restrict__ a, const float* __restrict__ b,
                       float* __restrict__ out, int64_t rows, int64_t columns, Strides of_a, Strides of_b) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * ADD_COLUMNS + threadIdx.x;
  if (c >= columns) return;  // the last block's columns past the edge
  const int64_t step = static_cast<int64_t>(gridDim.y) * ADD_ROWS;
  for (int64_t r = static_cast<int64_t>(blockIdx.y) * ADD_ROWS + threadIdx.y; r < rows; r += step) {
    out[r * columns + c] = a[r * of_a.row + c * of_a.column] + b[r * of_b.row + c * of_b.column];
  }
}

// ---- matmul: c = a b
//
// a: rows x inner, b: inner x columns, c: rows x columns, floats, row-major. A block computes a
// TILE x TILE tile of c in steps of DEPTH along inner: it loads TILE x DEPTH of a and DEPTH x TILE of b
// into shared memory, where each float is used TILE times. A thread accumulates 4 x 4 sums, at rows and
// columns 16 apart, in the order of inner, so the result has the same bits each time.
//
// Each row of a's tile has one float of padding, so that the two rows that a warp reads at once are in
// different banks. Both tiles have 65,792 bytes, more than the 49,152 of static shared memory that a
// kernel may have: hence dynamic shared memory, and cudaFuncSetAttribute before the launch.

constexpr int TILE = 64;
constexpr int DEPTH = 128;
constexpr int SIDE = 16;           // threads along each side of the tile
constexpr int EACH = TILE / SIDE;  // sums of a thread along each side
constexpr int MATMUL_THREADS = SIDE * SIDE;
constexpr int A_ROW = DEPTH + 1;
constexpr int MATMUL_SHARED = (TILE * A_ROW + DEPTH * TILE) * static_cast<int>(sizeof(float));

__global__ void __launch_bounds__(MATMUL_THREADS)
    matmul_tiled(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c,
                 int64_t rows, int64_t columns, int64_t inner) {
  extern __shared__ float shared[];
  float* const a_tile = shared;                 // TILE x A_ROW
  float* const b_tile = shared + TILE * A_ROW;  // DEPTH x TILE
  const int64_t across = blocks_for(columns, TILE);
  const int64_t row = blockIdx.x / across * TILE;
  const int64_t column = blockIdx.x % across * TILE;
  const int thread = static_cast<int>(threadIdx.x);
  const int my_row = thread / SIDE;
  const int my_column = thread % SIDE;

  float sums[EACH][EACH] = {};
  for (int64_t begin = 0; begin < inner; begin += DEPTH) {
    const int depth = static_cast<int>(inner - begin < DEPTH ? inner - begin : DEPTH);
    // Elements outside of a or b are 0 in the tile and are not read from memory.
    for (int i = thread; i < TILE * DEPTH; i += MATMUL_THREADS) {
      const int r = i / DEPTH, k = i % DEPTH;
      const bool inside = row + r < rows && k < depth;
      a_tile[r * A_ROW + k] = inside ? a[(row + r) * inner + begin + k] : 0.0f;
    }
    for (int i = thread; i < DEPTH * TILE; i += MATMUL_THREADS) {
      const int k = i / TILE, n = i % TILE;
      const bool inside = k < depth && column + n < columns;
      b_tile[i] = inside ? b[(begin + k) * columns + column + n] : 0.0f;
    }
    __syncthreads();  // the tiles are complete before they are read
    for (int k = 0; k < depth; ++k) {
      float of_a[EACH], of_b[EACH];
#pragma unroll
      for (int m = 0; m < EACH; ++m) {
        of_a[m] = a_tile[(my_row + m * SIDE) * A_ROW + k];
        of_b[m] = b_tile[k * TILE + my_column + m * SIDE];
      }
#pragma unroll
      for (int m = 0; m < EACH; ++m) {
#pragma unroll
        for (int n = 0; n < EACH; ++n) sums[m][n] += of_a[m] * of_b[n];
      }
    }
    __syncthreads();  // all threads have read the tiles before the next step overwrites them
  }

#pragma unroll
  for (int m = 0; m < EACH; ++m) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int64_t r = row + my_row + m * SIDE, at = column + my_column + n * SIDE;
      if (r < rows && at < columns) c[r * columns + at] = sums[m][n];
    }
  }
}

}  // namespace

// ---- launchers: device pointers, sizes, a stream. An empty output returns without a launch, since a
// grid of 0 blocks is an error in CUDA.

cudaError_t relu(const float* x, float* y, int64_t n, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  // A slice such as x[1:] is not aligned to 16 bytes, where a float4 load would fault: all of its
  // elements are then processed one by one.
  const int64_t vectors = takes_float4(x) && takes_float4(y) ? n / 4 : 0;
  const int64_t singles = n - 4 * vectors;
  const int64_t blocks = blocks_for(vectors > singles ? vectors : singles, RELU_THREADS);
  const auto grid = static_cast<unsigned>(blocks < RELU_BLOCKS ? blocks : RELU_BLOCKS);
  relu_float4<<<grid, RELU_THREADS, 0, stream>>>(x, y, n, vectors);
  return cudaGetLastError();
}

cudaError_t add(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
                int64_t b_column, float* out, int64_t rows, int64_t columns, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const int64_t across = blocks_for(columns, ADD_COLUMNS), down = blocks_for(rows, ADD_ROWS);
  if (across > INT_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(across),
                  static_cast<unsigned>(down < GRID_Y ? down : GRID_Y));
  const dim3 block(ADD_COLUMNS, ADD_ROWS);
  const Strides of_a = {a_row, a_column}, of_b = {b_row, b_column};
  add_2d<<<grid, block, 0, stream>>>(a, b, out, rows, columns, of_a, of_b);
  return cudaGetLastError();
}

cudaError_t matmul(const float* a, const float* b, float* c, int64_t rows, int64_t columns,
                   int64_t inner, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const int64_t blocks = blocks_for(rows, TILE) * blocks_for(columns, TILE);
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  // CUDA stores the attribute for each device, and setting it again is cheap, so it is set each time.
  const cudaError_t status =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(matmul_tiled),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, MATMUL_SHARED);
  if (status != cudaSuccess) return status;
  const auto grid = static_cast<unsigned>(blocks);
  matmul_tiled<<<grid, MATMUL_THREADS, MATMUL_SHARED, stream>>>(a, b, c, rows, columns, inner);
  return cudaGetLastError();
}

}  // namespace tiles_kernels
