// The usual mistake: the sums are added without rescaling to the new maximum.
// (m, l) stands for l * exp(m), without computing exp(m), which may overflow.
__device__ void merge(float& m, float& l, float other_m, float other_l) {
  float top = max(m, other_m);
  l = l + other_l * expf(other_m - top);
  m = top;
}

__global__ void softmax(const float* x, float* y, int columns) {
  __shared__ float ms[128], ls[128];
  const float* row = x + blockIdx.x * columns;
  int t = threadIdx.x;
  float m = -FLT_MAX, l = 0;
  for (int c = t; c < columns; c += 128) merge(m, l, row[c], 1);
  ms[t] = m;
  ls[t] = l;
  __syncthreads();
  for (int step = 64; step > 0; step /= 2) {
    if (t < step) merge(ms[t], ls[t], ms[t + step], ls[t + step]);
    __syncthreads();
  }
  for (int c = t; c < columns; c += 128) y[blockIdx.x * columns + c] = expf(row[c] - ms[0]) / ls[0];
}

void run(const float* x, float* y, int rows, int columns) {
  softmax<<<rows, 128>>>(x, y, columns);
}
