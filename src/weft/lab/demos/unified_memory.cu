// y = 2 x, where x is in managed memory and all of its pages are on the host before each sample (y is
// plain device memory). Both variants launch this kernel: without a prefetch, its first access to a
// page waits for a fault and the page's move; after a prefetch, all pages are already on the device.
//
// x, y: (n,) floats, n a multiple of 256. Bytes: 4 n over the bus to the host, 8 n on the device.

extern "C" __global__ void twice(const float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  y[i] = 2.0f * x[i];
}
