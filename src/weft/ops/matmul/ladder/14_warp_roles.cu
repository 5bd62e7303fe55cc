// Step 14: roles. One thread of the first warp group copies, the second group multiplies.
//
// In step 13 all warps meet at a barrier after each step, and the tensor cores idle until the next
// instruction is issued. Here the producer runs ahead on its own, and the consumer starts the products of
// a step before those of the step before have ended. The groups meet only at the stages' barriers: full,
// and empty.
#include "wgmma_tiles.cuh"

namespace { constexpr int STAGES = 4, GROUPS = 1; }

// One block of two warp groups for each 64 x 256 of c, tiles row by row. Dynamic shared memory: four
// stages of 40 KiB and their barriers.
extern "C" __global__ void __launch_bounds__(2 * GROUP_THREADS)
matmul_warp_roles(const __grid_constant__ LadderArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned stages = shared_address(memory);
  const Pipeline<STAGES> pipeline{stages + STAGES * STAGE_BYTES<GROUPS>};
  if (threadIdx.x == 0) pipeline.init(4 * GROUPS);  // one arrival of each consumer warp
  __syncthreads();
  const int row = blockIdx.x / arguments.column_tiles * 64;
  const int column = blockIdx.x % arguments.column_tiles * BN;
  RingPosition<STAGES> ring;
  if (group_index() == 0) {
    if (is_issuer()) produce<GROUPS>(arguments, pipeline, ring, stages, row, column);
  } else {
    float sums[BN / 2];
    consume<GROUPS>(sums, arguments, 0, pipeline, ring, stages);
    store_sums(sums, arguments, row, column);
  }
}
