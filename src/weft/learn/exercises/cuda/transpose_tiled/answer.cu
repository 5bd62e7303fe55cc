// Answer: both halves go along rows; the tile has one column more.
__global__ void transpose(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[32][33];
  for (int j = threadIdx.y; j < 32; j += 8) {
    int row = blockIdx.y * 32 + j, column = blockIdx.x * 32 + threadIdx.x;
    if (row < rows && column < columns) tile[j][threadIdx.x] = x[row * columns + column];
  }
  __syncthreads();
  for (int j = threadIdx.y; j < 32; j += 8) {
    int row = blockIdx.x * 32 + j, column = blockIdx.y * 32 + threadIdx.x;
    if (row < columns && column < rows) y[row * rows + column] = tile[threadIdx.x][j];
  }
}

void run(const float* x, float* y, int rows, int columns) {
  transpose<<<dim3((columns + 31) / 32, (rows + 31) / 32), dim3(32, 8)>>>(x, y, rows, columns);
}
