// Each element takes one of four branches, by its index: i % 4. A warp issues one instruction at a
// time: if its threads take four branches, it runs all four, with three quarters of its threads idle.
//
// x, y: (n,) with n = gridDim.x * 256. An element has STEPS dependent multiply-adds and 8 bytes.
constexpr int STEPS = 512;

__device__ float iterate(int branch, float x) {
  float v = x;
  switch (branch) {
    case 0: for (int k = 0; k < STEPS; ++k) v = fmaf(v, v, -x); break;
    case 1: for (int k = 0; k < STEPS; ++k) v = fmaf(v, 0.5f, x); break;
    case 2: for (int k = 0; k < STEPS; ++k) v = fmaf(v, -0.5f, x); break;
    default: for (int k = 0; k < STEPS; ++k) v = fmaf(v, x, 0.25f); break;
  }
  return v;
}

extern "C" __global__ void diverging(const float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;  // a warp has all four branches
  y[i] = iterate(i % 4, x[i]);
}

extern "C" __global__ void together(const float* x, float* y) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Each of four warps takes one branch's elements of 128 in a row.
  long long i = (long long)blockIdx.x * 256 + warp / 4 * 128 + lane * 4 + warp % 4;
  y[i] = iterate(i % 4, x[i]);
}
