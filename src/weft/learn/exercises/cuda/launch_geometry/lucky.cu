// Right for the picture's 3 x 2 blocks of 5 x 3 threads only.
__global__ void label(int* cells) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  int row = blockIdx.y * blockDim.y + threadIdx.y;
  int width = 15;
  int block = blockIdx.y * gridDim.x + blockIdx.x;
  int thread = threadIdx.y * blockDim.x + threadIdx.x;
  cells[row * width + column] = 1000 * block + thread;
}

void run(int* cells, int bx, int by, int tx, int ty) {
  label<<<dim3(bx, by), dim3(tx, ty)>>>(cells);
}
