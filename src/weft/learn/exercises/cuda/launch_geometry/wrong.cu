// The usual mistake: the thread's number with y fastest.
__global__ void label(int* cells) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  int row = blockIdx.y * blockDim.y + threadIdx.y;
  int width = gridDim.x * blockDim.x;
  int block = blockIdx.y * gridDim.x + blockIdx.x;
  int thread = threadIdx.x * blockDim.y + threadIdx.y;
  cells[row * width + column] = 1000 * block + thread;
}

void run(int* cells, int bx, int by, int tx, int ty) {
  label<<<dim3(bx, by), dim3(tx, ty)>>>(cells);
}
