// The usual mistake: a mask by the index alone, which lets columns wrap into the next row.
__global__ void add_bias(const float* x, const float* bias, float* y, int rows, int columns) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  int row = blockIdx.y * blockDim.y + threadIdx.y;
  int i = row * columns + column;
  if (i < rows * columns) y[i] = x[i] + bias[column];
}

void run(const float* x, const float* bias, float* y, int rows, int columns) {
  dim3 block(16, 16);
  dim3 grid((columns + 15) / 16, (rows + 15) / 16);
  add_bias<<<grid, block>>>(x, bias, y, rows, columns);
}
