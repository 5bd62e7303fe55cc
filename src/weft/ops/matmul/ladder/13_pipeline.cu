// Step 13: a ring of four stages. Three steps are on their way while one is multiplied.
//
// In step 12 the tensor cores wait for each copy from its beginning to its end, about a microsecond. Here
// a thread asks for the tiles of three steps ahead, as soon as the stage that they go to has been read.
#include "wgmma_tiles.cuh"

namespace { constexpr int STAGES = 4; }

// One block of four warps for each 64 x 256 of c, tiles row by row. Dynamic shared memory: four stages of
// 40 KiB and their barriers.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
matmul_pipeline(const __grid_constant__ LadderArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned stages = shared_address(memory), barriers = stages + STAGES * STAGE_BYTES<1>;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) mbarrier_init(barriers + stage * 8, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int row = blockIdx.x / arguments.column_tiles * 64;
  const int column = blockIdx.x % arguments.column_tiles * BN;
  const auto fill = [&](int step) {
    const int stage = step % STAGES;
    mbarrier_arrive_expect(barriers + stage * 8, STAGE_BYTES<1>);
    load_tiles<1>(arguments, stages + stage * STAGE_BYTES<1>, row, column, step, barriers + stage * 8);
  };
  if (threadIdx.x == 0)
    for (int step = 0; step < STAGES - 1 && step < arguments.k_steps; ++step) fill(step);
  float sums[BN / 2];
  RingPosition<STAGES> ring;
  for (int step = 0; step < arguments.k_steps; ++step, ring.next()) {
    const unsigned stage = stages + ring.stage * STAGE_BYTES<1>;
    // The stage of step + 3 is that of step - 1, whose products have ended.
    if (threadIdx.x == 0 && step + STAGES - 1 < arguments.k_steps) fill(step + STAGES - 1);
    wait(barriers + ring.stage * 8, ring.parity);
    start_products(sums, stage, stage + A_BYTES<1>, step > 0);
    wgmma_wait<0>();
    __syncthreads();
  }
  store_sums(sums, arguments, row, column);
}
