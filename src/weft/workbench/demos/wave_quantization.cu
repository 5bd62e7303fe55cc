// A share of n elements for each block, of which exactly one fits on an SM: it is launched with all
// the shared memory that an SM gives to a block, and uses none of it.
//
// Blocks run in waves of as many as there are SMs. One block more than a full wave is a wave of its
// own, in which all SMs but one have nothing to do. x, y: (n,); a block's elements lie side by
// side, chunk of them; STEPS dependent multiply-adds an element.
constexpr int STEPS = 256;

extern "C" __global__ void shares(const float* x, float* y, long long n, long long chunk) {
  long long first = blockIdx.x * chunk, end = min(first + chunk, n);
  for (long long i = first + threadIdx.x; i < end; i += blockDim.x) {
    float start = x[i], v = start;
    for (int k = 0; k < STEPS; ++k) v = fmaf(v, v, -start);
    y[i] = v;
  }
}
