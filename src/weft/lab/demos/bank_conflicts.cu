// Row sums of x (rows, 32); a warp computes 32 rows. It loads its tile row by row, so that the loads
// coalesce. Then each thread adds up one row from shared memory.
//
// Shared memory has 32 banks of 4 bytes and serves one word of each bank a cycle. With rows of 32 words
// all threads of a warp use the same bank; with one word of padding a row, each uses a different bank.
// y: (rows,), rows = 256 * gridDim.x. Bytes: 128 read and 4 written a row.
constexpr int WARPS = 8;  // warps of a block

template <int WIDTH>
__device__ void row_sums(const float* x, float* y, volatile float* tiles) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  volatile float* tile = tiles + warp * 32 * WIDTH;
  long long first = ((long long)blockIdx.x * WARPS + warp) * 32;
  float loaded[32];  // all loads are in flight before the first value is used
#pragma unroll
  for (int row = 0; row < 32; ++row) loaded[row] = x[(first + row) * 32 + lane];
#pragma unroll
  for (int row = 0; row < 32; ++row) tile[row * WIDTH + lane] = loaded[row];
  __syncwarp();
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 32; ++k) sum += tile[lane * WIDTH + k];  // bank (lane * WIDTH + k) % 32
  y[first + lane] = sum;
}

extern "C" __global__ void conflicting(const float* x, float* y) {
  __shared__ float tiles[WARPS * 32 * 32];
  row_sums<32>(x, y, tiles);
}

extern "C" __global__ void padded(const float* x, float* y) {
  __shared__ float tiles[WARPS * 32 * 33];
  row_sums<33>(x, y, tiles);
}
