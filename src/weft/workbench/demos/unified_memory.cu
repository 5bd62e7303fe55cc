// y = 2 x, where x is in managed memory, and each of its pages on the host when the kernel starts
// (y is plain device memory). The kernel is the same both times: at the first touch of a page it
// waits for a fault and the page's move, or it finds all pages there, moved by one prefetch.
//
// x, y: (n,) floats, n a multiple of 256. Bytes: 4 n over the bus to the host, 8 n on the device.

extern "C" __global__ void twice(const float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  y[i] = 2.0f * x[i];
}
