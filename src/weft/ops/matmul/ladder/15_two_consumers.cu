// Step 15: two consumer groups, 128 x 256 of c a block.
//
// Both groups multiply with the same tile of b: 48 KiB are copied for each step of 128 x 256 x 64, where
// step 14 copies 80. The producer gives up registers, so that each consumer has room for its 128 sums.
#include "wgmma_tiles.cuh"

namespace {

constexpr int STAGES = 4, GROUPS = 2;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // with 384 threads: 64,512 of 65,536

}  // namespace

// One block of three warp groups for each 128 x 256 of c, tiles row by row. Dynamic shared memory: four
// stages of 48 KiB and their barriers.
extern "C" __global__ void __launch_bounds__(3 * GROUP_THREADS, 1)
matmul_two_consumers(const __grid_constant__ LadderArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned stages = shared_address(memory);
  const Pipeline<STAGES> pipeline{stages + STAGES * STAGE_BYTES<GROUPS>};
  if (threadIdx.x == 0) pipeline.init(4 * GROUPS);
  __syncthreads();
  const int row = blockIdx.x / arguments.column_tiles * 128;
  const int column = blockIdx.x % arguments.column_tiles * BN;
  RingPosition<STAGES> ring;
  const int role = group_index();
  if (role == 0) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (is_issuer()) produce<GROUPS>(arguments, pipeline, ring, stages, row, column);
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    float sums[BN / 2];
    consume<GROUPS>(sums, arguments, role - 1, pipeline, ring, stages);
    store_sums(sums, arguments, row + (role - 1) * 64, column);
  }
}
