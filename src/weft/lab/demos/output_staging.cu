// y = the transpose of x, (n, n) floats, n a multiple of 32. A block of 32 x 8 threads transposes a
// tile of 32 x 32. Bytes: 4 n^2 read, 4 n^2 written.
//
// Written directly, the 32 elements of a row that a warp has read go to 32 rows of y, each into a
// different sector. Staged in shared memory, the tile is read by columns (33 words a row, so that a
// column uses 32 different banks) and written by rows.
constexpr int TILE = 32, ROWS = 8;

extern "C" __global__ void straight(const float* x, float* y, long long n) {
  long long column = blockIdx.x * TILE + threadIdx.x, row = blockIdx.y * TILE + threadIdx.y;
#pragma unroll
  for (int r = 0; r < TILE; r += ROWS) y[column * n + row + r] = x[(row + r) * n + column];
}

extern "C" __global__ void staged(const float* x, float* y, long long n) {
  __shared__ float tile[TILE][TILE + 1];
  long long column = blockIdx.x * TILE + threadIdx.x, row = blockIdx.y * TILE + threadIdx.y;
#pragma unroll
  for (int r = 0; r < TILE; r += ROWS)
    tile[threadIdx.y + r][threadIdx.x] = x[(row + r) * n + column];
  __syncthreads();
  column = blockIdx.y * TILE + threadIdx.x, row = blockIdx.x * TILE + threadIdx.y;  // in y
#pragma unroll
  for (int r = 0; r < TILE; r += ROWS)
    y[(row + r) * n + column] = tile[threadIdx.x][threadIdx.y + r];
}
