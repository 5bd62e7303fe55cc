// Sixteen reads of one element: x and y have N floats, a thread for each, y = 16 x by additions.
// volatile moves 16 * 4 bytes an element from the L2, and plain 4, both 4 bytes to memory.
constexpr int READS = 16;

extern "C" __global__ void rereading(const volatile float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < READS; ++k) sum += x[i];  // volatile: a load each time, as written
  y[i] = sum;
}

extern "C" __global__ void plain(const float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < READS; ++k) sum += x[i];  // one load: the compiler keeps the value in a register
  y[i] = sum;
}
