// The negative of an image, y = 255 - x in bytes, which is ~x: one byte a thread, or sixteen.
//
// x, y: (n,) bytes, n a multiple of 4096; 2 n bytes move. Only bytes in flight keep memory busy:
// 2048 threads of an SM with one byte each are far too few.

extern "C" __global__ void bytewise(const unsigned char* x, unsigned char* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  y[i] = ~x[i];
}

extern "C" __global__ void sixteen(const uint4* x, uint4* y) {
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  uint4 v = x[i];  // one load of 128 bits
  y[i] = make_uint4(~v.x, ~v.y, ~v.z, ~v.w);
}
