// Exercise: each thread of a two-dimensional launch labels its cell.
__global__ void label(int* cells) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  int row = 0;     // YOUR CODE
  int width = 0;   // YOUR CODE: threads of the whole grid in x
  int block = 0;   // YOUR CODE
  int thread = 0;  // YOUR CODE
  cells[row * width + column] = 1000 * block + thread;
}

void run(int* cells, int bx, int by, int tx, int ty) {
  label<<<1, 1>>>(cells);  // YOUR CODE: bx x by blocks of tx x ty threads
}
