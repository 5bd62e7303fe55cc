// Losses of a chunk of logits, which are overwritten by the gradient of the losses' sum.
//
// Bytes: each logit is read twice (the second time from the L2, if the rows in flight fit there) and each
// gradient written once. cross_entropy_fused_smem.cu reads it once.
#include "cross_entropy.cuh"

// x: (rows, columns), rows `stride` apart, overwritten; targets, losses: (rows,). One block per row.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_fused(WEFT_T* x, const index_t* targets, float* losses, index_t columns,
                    index_t stride, index_t ignore_index, double smoothing, double z_loss) {
  const index_t target = targets[blockIdx.x];
  const bool counts = target != ignore_index;
  const LossParams params(columns, smoothing, z_loss);
  x += blockIdx.x * stride;
  const Row row(x, params.columns);
  const RowLoss result = row_loss(x, row, target, params);  // ends with a barrier: x may be overwritten
  write_gradient(x, x, row, target, counts ? result.lse : 0.0f, 1.0f, counts, params);
  if (threadIdx.x == 0) losses[blockIdx.x] = counts ? result.loss : 0.0f;
}

// x: (n,) of type In; grad: one number; out: (n,). A thread takes N elements, 16 bytes of out.
template <typename In>
__device__ __forceinline__ void scale(const In* x, float g, WEFT_T* out, index_t n) {
  using From = Vector<In, N>;
  using To = Vector<WEFT_T, N>;
  const index_t first = ((index_t)blockIdx.x * THREADS + threadIdx.x) * N;
  const unsigned long long addresses = (unsigned long long)x | (unsigned long long)out;
  if (first + N <= n && addresses % sizeof(From) == 0) {
    const From in = *reinterpret_cast<const From*>(x + first);
    To scaled;
#pragma unroll
    for (int j = 0; j < N; ++j) scaled.at[j] = from_float<WEFT_T>(to_float(in.at[j]) * g);
    *reinterpret_cast<To*>(out + first) = scaled;
    return;
  }
  for (int j = 0; j < N && first + j < n; ++j)
    out[first + j] = from_float<WEFT_T>(to_float(x[first + j]) * g);
}

extern "C" __global__ void __launch_bounds__(THREADS)
scale_same_dtype(const WEFT_T* x, const float* grad, WEFT_T* out, index_t n) {
  scale(x, *grad, out, n);
}

extern "C" __global__ void __launch_bounds__(THREADS)
scale_from_float32(const float* x, const float* grad, WEFT_T* out, index_t n) {
  scale(x, *grad, out, n);
}
