// Answer: the kernel runs on copies in the device's memory.
__device__ float square(float v) { return v * v; }

__global__ void square_all(const float* a, float* b, int n) {
  int i = threadIdx.x;
  b[i] = square(a[i]);
}

void run(const float* x, float* y, int n) {
  float *a, *b;
  cudaMalloc(&a, n * sizeof(float));
  cudaMalloc(&b, n * sizeof(float));
  cudaMemcpy(a, x, n * sizeof(float), cudaMemcpyHostToDevice);
  square_all<<<1, n>>>(a, b, n);
  cudaMemcpy(y, b, n * sizeof(float), cudaMemcpyDeviceToHost);
  cudaFree(a);
  cudaFree(b);
}
