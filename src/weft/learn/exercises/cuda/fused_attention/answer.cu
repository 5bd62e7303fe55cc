// Answer: with each new maximum the sum and the output so far are rescaled.
constexpr int D = 32;  // elements of a query, a key and a value

__global__ void attention(const float* q, const float* k, const float* v, float* out, int queries, int keys) {
  __shared__ float tk[32][D], tv[32][D];
  int row = blockIdx.x * 64 + threadIdx.x;
  float own[D], sum[D], m = -FLT_MAX, l = 0;
  for (int c = 0; c < D; ++c) own[c] = row < queries ? q[row * D + c] / sqrtf(D) : 0, sum[c] = 0;
  for (int start = 0; start < keys; start += 32) {
    int count = min(32, keys - start);
    for (int i = threadIdx.x; i < count * D; i += 64) {
      tk[i / D][i % D] = k[start * D + i];
      tv[i / D][i % D] = v[start * D + i];
    }
    __syncthreads();
    for (int j = 0; j < count; ++j) {
      float score = 0;
      for (int c = 0; c < D; ++c) score += own[c] * tk[j][c];
      float top = max(m, score);
      float scale = expf(m - top), p = expf(score - top);
      l = l * scale + p;
      for (int c = 0; c < D; ++c) sum[c] = sum[c] * scale + p * tv[j][c];
      m = top;
    }
    __syncthreads();
  }
  if (row < queries) {
    for (int c = 0; c < D; ++c) out[row * D + c] = sum[c] / l;
  }
}

void run(const float* q, const float* k, const float* v, float* out, int queries, int keys) {
  attention<<<(queries + 63) / 64, 64>>>(q, k, v, out, queries, keys);
}
