// A softmax in CUDA C++ of one block for each row whose threads race for shared memory: a barrier is missing.
//
//     weft check softmax --with examples/debug/missing_barrier.cu --sanitize racecheck     # on a GPU
//
// weft: operator softmax
// weft: name cuda/missing-barrier
// weft: require contiguous x
// weft: let columns = x.shape[-1]; rows = x.numel() / columns
// weft: output y = empty_like(x)
// weft: launch softmax_racing<<<rows, 256>>>(x, y, columns)

// x, y: (rows, columns), contiguous. Each thread sums every 256th element of its block's row; half of the
// threads add the other half's sums, then a quarter, and so on.
extern "C" __global__ void softmax_racing(const scalar_t* x, scalar_t* y, long long columns) {
  __shared__ float sums[256];
  x += blockIdx.x * columns;
  y += blockIdx.x * columns;
  float sum = 0.0f;
  for (long long i = threadIdx.x; i < columns; i += 256) sum += expf((float)x[i]);
  sums[threadIdx.x] = sum;
  for (int half = 128; half > 0; half /= 2) {
    // Here a __syncthreads() is missing: sums of other warps may not be written yet.
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  for (long long i = threadIdx.x; i < columns; i += 256) y[i] = (scalar_t)(expf((float)x[i]) / sums[0]);
}
