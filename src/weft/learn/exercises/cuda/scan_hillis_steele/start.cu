// Exercise: prefix sums of each 256 elements.
__global__ void scan_blocks(const float* x, float* y, int n) {
  __shared__ float s[256];
  int t = threadIdx.x, i = blockIdx.x * 256 + t;
  s[t] = i < n ? x[i] : 0;
  __syncthreads();
  // YOUR CODE: eight steps, each with two barriers
  if (i < n) y[i] = s[t];
}

void run(const float* x, float* y, int n) {
  scan_blocks<<<(n + 255) / 256, 256>>>(x, y, n);
}
