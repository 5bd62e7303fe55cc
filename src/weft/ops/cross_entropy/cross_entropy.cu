// Cross entropy of (rows, columns) logits and (rows,) targets: a block a row.
//
// Forward: each logit is read once, none of an ignored row; 8 bytes a row written. Backward: each
// logit read once and each gradient written once. Rows may start anywhere and be strided.
#include "cross_entropy.cuh"

// x: (rows, columns), rows `stride` apart; targets, losses, lse: (rows,).
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_forward(const WEFT_T* x, const index_t* targets, float* losses, float* lse,
                      index_t columns, index_t stride, index_t ignore_index, double smoothing,
                      double z_loss) {
  const index_t at = blockIdx.x, target = targets[at];
  Answer answer = {0.0f, 0.0f};
  if (target != ignore_index) {
    x += at * stride;
    answer = loss_of(x, Row(x, (int)columns), target, Asked(columns, smoothing, z_loss));
  }
  if (threadIdx.x == 0) {
    losses[at] = answer.loss;
    lse[at] = answer.lse;
  }
}

// grad: (rows,), grad_stride apart (0: one for all); dx: rows dx_stride apart, and may be x. The
// last row comes first: after a forward it is what the L2 still holds.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_backward(const float* grad, const WEFT_T* x, const index_t* targets,
                       const float* lse, WEFT_T* dx, index_t columns, index_t grad_stride,
                       index_t stride, index_t dx_stride, index_t ignore_index, double smoothing,
                       double z_loss) {
  const index_t at = gridDim.x - 1 - blockIdx.x, target = targets[at];
  x += at * stride;
  write_gradient(x, dx + at * dx_stride, Row(x, (int)columns), target, lse[at],
                 grad[at * grad_stride], target != ignore_index,
                 Asked(columns, smoothing, z_loss));
}
