// Exercise: prefix sums of each 32 elements.
__global__ void scan_warps(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  float v = i < n ? x[i] : 0;
  // YOUR CODE: five steps with the distances 1, 2, 4, 8, 16
  if (i < n) y[i] = v;
}

void run(const float* x, float* y, int n) {
  scan_warps<<<(n + 127) / 128, 128>>>(x, y, n);
}
