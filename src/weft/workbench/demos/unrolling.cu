// v = v * v - x, many times over, in a loop that the compiler may unroll or not.
//
// A trip of the loop as written is one multiply-add and three instructions of its own: count,
// compare, branch. Unrolled by eight, those three serve eight multiply-adds.
// x, y: (n,) floats with n = gridDim.x * 256; bytes 8 n, which are nothing beside the arithmetic.

extern "C" __global__ void rolled(const float* x, float* y, long long steps) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  float first = x[i], v = first;
#pragma unroll 1
  for (int k = 0; k < (int)steps; ++k) v = fmaf(v, v, -first);
  y[i] = v;
}

extern "C" __global__ void unrolled(const float* x, float* y, long long steps) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  float first = x[i], v = first;
#pragma unroll 8
  for (int k = 0; k < (int)steps; ++k) v = fmaf(v, v, -first);
  y[i] = v;
}
