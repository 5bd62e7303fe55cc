// Exercise: y = x * x, computed on the device. x and y are host arrays of n elements, n <= 1024.
float square(float v) { return v * v; }  // YOUR CODE: a word before it

void square_all(const float* a, float* b, int n) {  // YOUR CODE: a word before it
  int i = threadIdx.x;
  b[i] = square(a[i]);
}

void run(const float* x, float* y, int n) {
  float *a, *b;
  // YOUR CODE: allocate a and b on the device, copy x to a, launch, copy b to y, free
}
