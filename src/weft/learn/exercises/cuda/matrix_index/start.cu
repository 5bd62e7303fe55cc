// Exercise: add a bias to each column of a row-major matrix.
__global__ void add_bias(const float* x, const float* bias, float* y, int rows, int columns) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  int row = blockIdx.y * blockDim.y + threadIdx.y;
  // YOUR CODE: the mask, the index, and the sum
}

void run(const float* x, const float* bias, float* y, int rows, int columns) {
  dim3 block(16, 16);
  dim3 grid((columns + 15) / 16, (rows + 15) / 16);
  add_bias<<<grid, block>>>(x, bias, y, rows, columns);
}
