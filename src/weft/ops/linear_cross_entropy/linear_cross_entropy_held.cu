// A chunk of logits whose rows wait in shared memory between their loss and their gradient, brought
// there by the bulk copy engine (compute capability 9.0 and later): one thread asks for a row.
//
// Bytes: each logit read once and each gradient written once.
#include "cross_entropy.cuh"
#include "bulk.cuh"

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

// x: (rows, columns), rows `stride` apart, which start on 16 bytes and are padded to as many; it is
// overwritten. targets, losses: (rows,). A block a row, with room for it in `memory`.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_held(WEFT_T* x, const index_t* targets, float* losses, index_t columns,
                   index_t stride, index_t ignore_index, double smoothing, double z_loss) {
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
  write_gradient(held, x, row, target, keep ? answer.lse : 0.0f, 1.0f, keep, asked);
  if (threadIdx.x == 0) losses[blockIdx.x] = keep ? answer.loss : 0.0f;
}

#endif
