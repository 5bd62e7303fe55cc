// Step 5: 16-byte loads, and just enough blocks to fill the GPU, which stride over the tensor.
//
// A quarter (float) or an eighth (16-bit types) of the load instructions, and a second launch with few
// partial sums. A thread now adds many elements one after another, so that its running sum is a double. One
// load is in flight for each thread; the last step, sum.cu, has several. Bytes: n read, 8 for each block
// written.
#include "partial.cuh"

constexpr int N = Wide<WEFT_T>::N;
using Pack = Vector<WEFT_T, N>;

struct AddDouble {
  static __device__ __forceinline__ double nothing() { return 0.0; }
  static __device__ __forceinline__ double merge(double a, double b) { return a + b; }
};

// x: (n,), aligned as its type; sums: (gridDim.x,). blockDim.x is a multiple of 32.
extern "C" __global__ void sum_step(const WEFT_T* x, double* sums, index_t n) {
  __shared__ double shared[32];
  const index_t first = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  const index_t step = (index_t)gridDim.x * blockDim.x;
  // Up to N - 1 elements lie before the first 16-byte boundary, and as many after the last.
  const index_t before = ((16 - (reinterpret_cast<size_t>(x) & 15)) & 15) / sizeof(WEFT_T);
  const index_t head = before < n ? before : n;
  const index_t vectors = (n - head) / N, done = head + vectors * N;
  double sum = 0.0;
// No unrolling: the compiler would issue several loads at once, which is the idea of the next step.
#pragma unroll 1
  for (index_t v = first; v < vectors; v += step) {
    const Pack pack = reinterpret_cast<const Pack*>(x + head)[v];
    Short part = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) part += widen(pack.at[j]);
    sum += part;
  }
  if (first < head) sum += widen(x[first]);
  if (done + first < n) sum += widen(x[done + first]);
  sum = warp_reduce<AddDouble>(sum);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = warp_reduce<AddDouble>(threadIdx.x < blockDim.x / 32 ? shared[threadIdx.x] : 0.0);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
