// The usual mistake: one barrier for each step, and s[t] changes while others read it.
__global__ void scan_blocks(const float* x, float* y, int n) {
  __shared__ float s[256];
  int t = threadIdx.x, i = blockIdx.x * 256 + t;
  s[t] = i < n ? x[i] : 0;
  __syncthreads();
  for (int d = 1; d < 256; d *= 2) {
    float before = t >= d ? s[t - d] : 0;
    s[t] += before;
    __syncthreads();
  }
  if (i < n) y[i] = s[t];
}

void run(const float* x, float* y, int n) {
  scan_blocks<<<(n + 255) / 256, 256>>>(x, y, n);
}
