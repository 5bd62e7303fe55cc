// The usual mistake: the stride of one block, so that blocks compute each other's elements again.
__global__ void saxpy(const float* x, float* y, float a, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x) {
    y[i] = a * x[i] + y[i];
  }
}

void run(const float* x, float* y, float a, int n) {
  saxpy<<<4, 64>>>(x, y, a, n);
}
