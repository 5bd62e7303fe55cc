// Answer: a lane's rank is the number of votes in the lanes before it.
__global__ void compact(const float* x, float* y, int* kept, int n) {
  int lane = threadIdx.x, i = blockIdx.x * 32 + lane;
  bool keep = i < n && x[i] > 0;
  unsigned votes = __ballot_sync(0xffffffff, keep);
  int rank = __popc(votes & ((1u << lane) - 1));
  if (keep) y[blockIdx.x * 32 + rank] = x[i];
  if (lane == 0) kept[blockIdx.x] = __popc(votes);
}

void run(const float* x, float* y, int* kept, int n) {
  compact<<<(n + 31) / 32, 32>>>(x, y, kept, n);
}
