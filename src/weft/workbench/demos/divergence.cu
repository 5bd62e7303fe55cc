// Every element goes one of four ways, by its place: i % 4. A warp has one program counter: where
// its threads go four ways, it walks all four, each with three quarters of the threads idle.
//
// x, y: (n,) with n = gridDim.x * 256. STEPS dependent multiply-adds an element, 8 bytes.
constexpr int STEPS = 512;

__device__ float walk(int way, float x) {
  float v = x;
  switch (way) {
    case 0: for (int k = 0; k < STEPS; ++k) v = fmaf(v, v, -x); break;
    case 1: for (int k = 0; k < STEPS; ++k) v = fmaf(v, 0.5f, x); break;
    case 2: for (int k = 0; k < STEPS; ++k) v = fmaf(v, -0.5f, x); break;
    default: for (int k = 0; k < STEPS; ++k) v = fmaf(v, x, 0.25f); break;
  }
  return v;
}

extern "C" __global__ void diverging(const float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;  // a warp has all four
  y[i] = walk(i % 4, x[i]);
}

extern "C" __global__ void together(const float* x, float* y) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Of 128 elements, four warps take one way each.
  long long i = (long long)blockIdx.x * 256 + warp / 4 * 128 + lane * 4 + warp % 4;
  y[i] = walk(i % 4, x[i]);
}
