// The right numbers from the wrong side: a loop of the host.
__device__ float square(float v) { return v * v; }

__global__ void square_all(const float* a, float* b, int n) { b[threadIdx.x] = square(a[threadIdx.x]); }

void run(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = x[i] * x[i];
}
