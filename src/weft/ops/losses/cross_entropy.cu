// Cross entropy of (rows, columns) logits and (rows,) targets: one block per row.
//
// Forward: each logit is read once, those of an ignored row not at all; 8 bytes per row are written.
// Backward: each logit is read once and each gradient written once. Rows may start at any element and be
// strided.
#include "cross_entropy.cuh"

// x: (rows, columns), rows `stride` apart; targets, losses, lse: (rows,).
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_forward(const WEFT_T* x, const index_t* targets, float* losses, float* lse,
                      index_t columns, index_t stride, index_t ignore_index, double smoothing,
                      double z_loss) {
  // An ignored row leaves early with 0 for both outputs; the condition is uniform over the block.
  const index_t row = blockIdx.x, target = targets[row];
  RowLoss result = {0.0f, 0.0f};
  if (target != ignore_index) {
    x += row * stride;
    result = row_loss(x, Row(x, (int)columns), target, LossParams(columns, smoothing, z_loss));
  }
  if (threadIdx.x == 0) {
    losses[row] = result.loss;
    lse[row] = result.lse;
  }
}

// grad: (rows,), grad_stride apart (0: one for all rows); dx: rows dx_stride apart, and may be x. Blocks
// run from the last row to the first: after a forward the last rows are still in the L2.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_backward(const float* grad, const WEFT_T* x, const index_t* targets,
                       const float* lse, WEFT_T* dx, index_t columns, index_t grad_stride,
                       index_t stride, index_t dx_stride, index_t ignore_index, double smoothing,
                       double z_loss) {
  const index_t row = gridDim.x - 1 - blockIdx.x, target = targets[row];
  x += row * stride;
  write_gradient(x, dx + row * dx_stride, Row(x, (int)columns), target, lse[row],
                 grad[row * grad_stride], target != ignore_index,
                 LossParams(columns, smoothing, z_loss));
}
