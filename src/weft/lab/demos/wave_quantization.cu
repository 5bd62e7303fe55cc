// n elements divided among blocks, of which exactly one fits on an SM: each is launched with all the
// shared memory that a block can have, and uses none of it.
//
// Blocks run in waves of one block for each SM. One block more than a full wave is a wave of its own,
// in which all SMs but one are idle. x, y: (n,); a block has `chunk` contiguous elements, each with
// STEPS dependent multiply-adds.
constexpr int STEPS = 256;

extern "C" __global__ void shares(const float* x, float* y, long long n, long long chunk) {
  long long first = blockIdx.x * chunk, end = min(first + chunk, n);
  for (long long i = first + threadIdx.x; i < end; i += blockDim.x) {
    float start = x[i], v = start;
    for (int k = 0; k < STEPS; ++k) v = fmaf(v, v, -start);
    y[i] = v;
  }
}
