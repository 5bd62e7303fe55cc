// The right sum by one atomic addition for each element.
__global__ void sum_all(const float* x, float* sum, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(sum, x[i]);
}

void run(const float* x, float* sum, int n) {
  cudaMemset(sum, 0, sizeof(float));
  sum_all<<<(n + 255) / 256, 256>>>(x, sum, n);
}
