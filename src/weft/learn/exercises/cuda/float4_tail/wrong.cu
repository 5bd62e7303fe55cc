// The usual mistake: the number of float4s is rounded up, and the last one reaches behind the array.
__global__ void scale(const float* x, float* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float4* x4 = (const float4*)x;
  float4* y4 = (float4*)y;
  if (i < (n + 3) / 4) {
    float4 v = x4[i];
    v.x *= a;
    v.y *= a;
    v.z *= a;
    v.w *= a;
    y4[i] = v;
  }
}

void run(const float* x, float* y, float a, int n) {
  int threads = (n + 3) / 4;
  scale<<<(threads + 63) / 64, 64>>>(x, y, a, n);
}
