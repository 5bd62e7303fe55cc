// The usual mistake: the launch asks for `columns` bytes, a quarter of the floats.
__global__ void reverse_rows(const float* x, float* y, int columns) {
  extern __shared__ float row[];
  const float* source = x + blockIdx.x * columns;
  float* target = y + blockIdx.x * columns;
  for (int c = threadIdx.x; c < columns; c += blockDim.x) row[c] = source[c];
  __syncthreads();
  for (int c = threadIdx.x; c < columns; c += blockDim.x) target[c] = row[columns - 1 - c];
}

void run(const float* x, float* y, int rows, int columns) {
  reverse_rows<<<rows, 64, columns>>>(x, y, columns);
}
