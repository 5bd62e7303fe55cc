// y[i] = 2 x[i], one element for each thread. The kernels assign elements to threads differently.
//
// x, y: (n,) with n = gridDim.x * blockDim.x; 8 n bytes must move. Memory moves sectors of 32 bytes, so
// a warp whose threads access distant addresses moves eight times the bytes that it uses.

extern "C" __global__ void strided(const float* x, float* y) {
  // Neighbouring threads are gridDim.x elements apart
  long long i = (long long)threadIdx.x * gridDim.x + blockIdx.x;
  y[i] = 2.0f * x[i];
}

extern "C" __global__ void adjacent(const float* x, float* y) {
  // Neighbouring threads, neighbouring elements
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = 2.0f * x[i];
}
