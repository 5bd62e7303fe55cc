// y = 2 x, where x has just been copied to the device: from pageable memory of the host, or from pinned
// memory. Both variants launch this kernel, and copy the same bytes.
//
// x, y: (n,) floats, n a multiple of 256. Bytes: 4 n over the bus to the device, 8 n on the device.

extern "C" __global__ void twice_after_copy(const float* x, float* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  y[i] = 2.0f * x[i];
}
