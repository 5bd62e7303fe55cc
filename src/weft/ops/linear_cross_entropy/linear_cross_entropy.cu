// A chunk of logits: the losses of its rows, and over the logits the gradient of their sum.
//
// Bytes: each logit read twice (the second time from the L2, where the rows in flight fit) and each
// gradient written once. linear_cross_entropy_held.cu reads once.
#include "cross_entropy.cuh"

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
  write_gradient(x, x, row, target, keep ? answer.lse : 0.0f, 1.0f, keep, asked);
  if (threadIdx.x == 0) losses[blockIdx.x] = keep ? answer.loss : 0.0f;
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
