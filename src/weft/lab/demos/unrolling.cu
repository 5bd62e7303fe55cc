// v = v * v - x, many times, in a loop that the compiler must not unroll, or unrolls by eight.
//
// An iteration is one multiply-add and three instructions of the loop: count, compare, branch.
// Unrolled by eight, those three serve eight multiply-adds.
// x, y: (n,) floats with n = gridDim.x * 256; 8 n bytes, negligible beside the arithmetic.

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
