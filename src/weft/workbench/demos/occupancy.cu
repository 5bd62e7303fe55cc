// y = 2 x, a thread an element: one load, one store, and a long wait between. Two kernels of one
// body, launched with and without shared memory that they do not use: with so much of it that one
// block fits on an SM, 256 threads wait where 2048 could.
//
// x, y: (n,) floats with n = gridDim.x * 256; bytes 8 n.

extern "C" __global__ void one_block(const float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  y[i] = 2.0f * x[i];
}

extern "C" __global__ void eight_blocks(const float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  y[i] = 2.0f * x[i];
}
