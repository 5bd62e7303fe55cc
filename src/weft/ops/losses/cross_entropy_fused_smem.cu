// As cross_entropy_fused.cu, for rows that wait in shared memory between their loss and their gradient. One
// thread issues a bulk copy of the whole row (compute capability 9.0 and later).
//
// Bytes: each logit is read once and each gradient written once.
#include "cross_entropy.cuh"
#include "hopper.cuh"

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char row_smem[];

// x: (rows, columns), rows `stride` apart, which start on 16 bytes and are padded to a multiple of 16;
// overwritten. targets, losses: (rows,). One block per row; `row_smem` has the row's padded size.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_fused_smem(WEFT_T* x, const index_t* targets, float* losses, index_t columns,
                   index_t stride, index_t ignore_index, double smoothing, double z_loss) {
  // One mbarrier and one phase: the block handles one row, so that the parity is always 0.
  __shared__ unsigned long long arrived;
  const LossParams params(columns, smoothing, z_loss);
  x += blockIdx.x * stride;
  if (threadIdx.x == 0) {
    // The copy may include padding columns, which exist in memory and are not used.
    const int bytes = (params.columns * (int)sizeof(WEFT_T) + 15) / 16 * 16;
    init_mbarriers(&arrived);
    mbarrier_expect_bytes(&arrived, bytes);
    bulk_copy(row_smem, x, bytes, &arrived);
  }
  const index_t target = targets[blockIdx.x];
  const bool counts = target != ignore_index;
  const WEFT_T* row_logits = reinterpret_cast<const WEFT_T*>(row_smem);
  __syncthreads();  // the barrier in shared memory is initialised before other threads wait on it
  mbarrier_wait(&arrived, 0);
  const Row row(row_logits, params.columns);
  const RowLoss result = row_loss(row_logits, row, target, params);
  write_gradient(row_logits, x, row, target, counts ? result.lse : 0.0f, 1.0f, counts, params);
  if (threadIdx.x == 0) losses[blockIdx.x] = counts ? result.loss : 0.0f;
}

#endif
