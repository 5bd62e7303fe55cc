// y = 2 x, between a copy of x to the device and a copy of y to the host: for all elements at once, or for
// one part after another in several streams. Both variants launch this kernel, and copy the same bytes.
//
// x, y: (n,) floats, n a multiple of 256. Bytes: 4 n over the bus in each direction, 8 n on the device.

extern "C" __global__ void twice_between_copies(const float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  y[i] = 2.0f * x[i];
}
