// y = 2 x, one element for each thread: a load, a long wait, and a store. Two kernels with the same
// body, launched with and without shared memory that they do not use. With so much of it that only
// one block fits on an SM, 256 threads are resident instead of 2048.
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
