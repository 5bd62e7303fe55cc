// Answer: four sums for each thread, and each element of tb is read once for all four.
__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float ta[64][16], tb[16][16];
  int x = threadIdx.x, y = threadIdx.y;
  int column = blockIdx.x * 16 + x, first_row = blockIdx.y * 64;
  float sum[4] = {0, 0, 0, 0};
  for (int start = 0; start < k; start += 16) {
    for (int r = 0; r < 4; ++r) {
      int row = first_row + y + 16 * r;
      ta[y + 16 * r][x] = row < m && start + x < k ? a[row * k + start + x] : 0;
    }
    tb[y][x] = start + y < k && column < n ? b[(start + y) * n + column] : 0;
    __syncthreads();
    for (int j = 0; j < 16; ++j) {
      float v = tb[j][x];
      for (int r = 0; r < 4; ++r) sum[r] += ta[y + 16 * r][j] * v;
    }
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r) {
    int row = first_row + y + 16 * r;
    if (row < m && column < n) c[row * n + column] = sum[r];
  }
}

void run(const float* a, const float* b, float* c, int m, int n, int k) {
  matmul<<<dim3((n + 15) / 16, (m + 63) / 64), dim3(16, 16)>>>(a, b, c, m, n, k);
}
