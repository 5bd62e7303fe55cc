// Exercise: each warp keeps its positive elements and closes the gaps.
__global__ void compact(const float* x, float* y, int* kept, int n) {
  int lane = threadIdx.x, i = blockIdx.x * 32 + lane;
  bool keep = i < n && x[i] > 0;
  unsigned votes = 0;  // YOUR CODE: the vote of the warp
  int rank = lane;     // YOUR CODE: votes of the lanes before this one
  if (keep) y[blockIdx.x * 32 + rank] = x[i];
  if (lane == 0) kept[blockIdx.x] = __popc(votes);
}

void run(const float* x, float* y, int* kept, int n) {
  compact<<<(n + 31) / 32, 32>>>(x, y, kept, n);
}
