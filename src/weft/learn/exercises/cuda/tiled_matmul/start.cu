// Exercise: c = a b with tiles of 16 x 16 in shared memory.
__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  int column = blockIdx.x * 16 + threadIdx.x, row = blockIdx.y * 16 + threadIdx.y;
  float sum = 0;
  // YOUR CODE: a loop over tiles instead of this one
  for (int j = 0; j < k && row < m && column < n; ++j) sum += a[row * k + j] * b[j * n + column];
  if (row < m && column < n) c[row * n + column] = sum;
}

void run(const float* a, const float* b, float* c, int m, int n, int k) {
  matmul<<<dim3((n + 15) / 16, (m + 15) / 16), dim3(16, 16)>>>(a, b, c, m, n, k);
}
