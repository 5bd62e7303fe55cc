// The usual mistake: no mask, so that the last threads access memory behind the arrays.
constexpr int THREADS = 128;  // a block

__global__ void scale(const float* x, float* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = a * x[i];
}

void run(const float* x, float* y, float a, int n) {
  int blocks = (n + THREADS - 1) / THREADS;
  scale<<<blocks, THREADS>>>(x, y, a, n);
}
