// Answer: the mask keeps the last threads out, and the number of blocks is rounded up.
constexpr int THREADS = 128;  // a block

__global__ void scale(const float* x, float* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i];
}

void run(const float* x, float* y, float a, int n) {
  int blocks = (n + THREADS - 1) / THREADS;
  scale<<<blocks, THREADS>>>(x, y, a, n);
}
