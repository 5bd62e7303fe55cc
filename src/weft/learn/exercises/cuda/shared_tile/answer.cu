// Answer: load, barrier, store; the barrier is reached by every thread.
__global__ void reverse_blocks(const float* x, float* y, int n) {
  __shared__ float tile[64];
  int start = blockIdx.x * 64;
  int count = min(64, n - start);  // elements of this block
  int t = threadIdx.x;
  if (t < count) tile[t] = x[start + t];
  __syncthreads();
  if (t < count) y[start + t] = tile[count - 1 - t];
}

void run(const float* x, float* y, int n) {
  reverse_blocks<<<(n + 63) / 64, 64>>>(x, y, n);
}
