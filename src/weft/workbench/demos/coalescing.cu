// y[i] = 2 x[i], a thread an element. The two differ in which thread takes which element.
//
// x, y: (n,) with n = gridDim.x * blockDim.x. 8 n bytes must move either way; memory moves 32-byte
// sectors, so that a warp whose threads lie far apart moves eight times what it uses.

extern "C" __global__ void strided(const float* x, float* y) {
  long long i = (long long)threadIdx.x * gridDim.x + blockIdx.x;  // neighbours gridDim.x apart
  y[i] = 2.0f * x[i];
}

extern "C" __global__ void adjacent(const float* x, float* y) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;  // neighbours side by side
  y[i] = 2.0f * x[i];
}
