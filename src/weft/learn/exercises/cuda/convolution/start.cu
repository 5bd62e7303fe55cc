// Exercise: weighted sums of nine neighbours.
__constant__ float w[9];

__global__ void convolve(const float* x, float* y, int n) {
  __shared__ float tile[136];
  int start = blockIdx.x * 128;
  // YOUR CODE: load the tile with its halo, barrier
  float sum = 0;  // YOUR CODE: the weighted sum of nine places of the tile
  if (start + threadIdx.x < n) y[start + threadIdx.x] = sum;
}

void run(const float* x, const float* weights, float* y, int n) {
  // YOUR CODE: fill the constant memory
  convolve<<<(n + 127) / 128, 128>>>(x, y, n);
}
