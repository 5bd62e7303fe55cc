// Exercise: y = a x with one thread for each element, for every n.
constexpr int THREADS = 128;  // a block

__global__ void scale(const float* x, float* y, float a, int n) {
  int i = 0;  // YOUR CODE: the index of this thread's element
  y[i] = a * x[i];
}

void run(const float* x, float* y, float a, int n) {
  int blocks = 1;  // YOUR CODE
  scale<<<blocks, THREADS>>>(x, y, a, n);
}
