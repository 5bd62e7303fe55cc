// A chunk of logits: the losses of its rows, and over the logits the gradient of their sum.
//
// Bytes: each logit read once from memory and each gradient written once. Between its two passes a
// row waits in the L2 (cross_entropy_fused) or, brought there by the bulk copy engine of compute
// capability 9.0 and later, in shared memory (cross_entropy_held).
#include "cross_entropy.cuh"
#include "bulk.cuh"

// x: (rows, columns), rows `stride` apart, overwritten; targets, losses: (rows,). A block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_fused(WEFT_T* x, const index_t* targets, float* losses, index_t columns,
                    index_t stride, index_t ignore_index, double smoothing, double z_loss) {
  const index_t target = targets[blockIdx.x];
  const bool keep = target != ignore_index;
  const Asked asked(columns, smoothing, z_loss);
  x += blockIdx.x * stride;
  const Row row(x, asked.columns);
  const Answer answer = loss_of(x, row, target, asked);  // ends with a barrier: all is read
  write_gradient(x, x, row, target, answer.lse, 1.0f, keep, asked);
  if (threadIdx.x == 0) losses[blockIdx.x] = keep ? answer.loss : 0.0f;
}

#if __CUDA_ARCH__ >= 900
extern __shared__ __align__(128) unsigned char memory[];
#endif

// The same for rows that start on 16 bytes and are padded to as many: `memory` holds one.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_held(WEFT_T* x, const index_t* targets, float* losses, index_t columns,
                   index_t stride, index_t ignore_index, double smoothing, double z_loss) {
#if __CUDA_ARCH__ >= 900
  __shared__ unsigned long long arrived;
  const Asked asked(columns, smoothing, z_loss);
  x += blockIdx.x * stride;
  if (threadIdx.x == 0) {
    const int bytes = (asked.columns * (int)sizeof(WEFT_T) + 15) / 16 * 16;
    prepare(&arrived);
    expect(&arrived, bytes);
    copy(memory, x, bytes, &arrived);
  }
  const index_t target = targets[blockIdx.x];
  const bool keep = target != ignore_index;
  const WEFT_T* held = reinterpret_cast<const WEFT_T*>(memory);
  __syncthreads();
  wait(&arrived, 0);
  const Row row(held, asked.columns);
  const Answer answer = loss_of(held, row, target, asked);
  write_gradient(held, x, row, target, answer.lse, 1.0f, keep, asked);
  if (threadIdx.x == 0) losses[blockIdx.x] = keep ? answer.loss : 0.0f;
#endif
}

// x: (n,) of IN; grad: one number; out: (n,). A thread takes N elements, 16 bytes of out.
template <typename IN>
__device__ __forceinline__ void multiply(const IN* x, float g, WEFT_T* out, index_t n) {
  using From = Vector<IN, N>;
  using To = Vector<WEFT_T, N>;
  const index_t at = ((index_t)blockIdx.x * THREADS + threadIdx.x) * N;
  const unsigned long long places = (unsigned long long)x | (unsigned long long)out;
  if (at + N <= n && places % sizeof(From) == 0) {
    const From in = *reinterpret_cast<const From*>(x + at);
    To made;
#pragma unroll
    for (int j = 0; j < N; ++j) made.at[j] = from_float<WEFT_T>(to_float(in.at[j]) * g);
    *reinterpret_cast<To*>(out + at) = made;
    return;
  }
  for (int j = 0; j < N && at + j < n; ++j)
    out[at + j] = from_float<WEFT_T>(to_float(x[at + j]) * g);
}

extern "C" __global__ void __launch_bounds__(THREADS)
multiply_same(const WEFT_T* x, const float* grad, WEFT_T* out, index_t n) {
  multiply(x, *grad, out, n);
}

extern "C" __global__ void __launch_bounds__(THREADS)
multiply_wide(const float* x, const float* grad, WEFT_T* out, index_t n) {
  multiply(x, *grad, out, n);
}
