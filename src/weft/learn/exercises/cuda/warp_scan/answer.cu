// Answer: five steps; a lane adds only what comes from a lane of its warp.
__global__ void scan_warps(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  float v = i < n ? x[i] : 0;
  for (int d = 1; d < 32; d *= 2) {
    float w = __shfl_up_sync(0xffffffff, v, d);
    if (lane >= d) v += w;
  }
  if (i < n) y[i] = v;
}

void run(const float* x, float* y, int n) {
  scan_warps<<<(n + 127) / 128, 128>>>(x, y, n);
}
