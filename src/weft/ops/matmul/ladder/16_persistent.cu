// Step 16: one block an SM, which takes one tile of c after another, in bands of 8 rows of tiles.
//
// In step 15 each tile begins with an empty ring and ends with a store during which nothing is copied.
// Here the producer fills the ring for the next tile meanwhile. Bands make the tiles that run at the same
// time nearly square, so that they share their operands in the L2 cache.
#include "wgmma_tiles.cuh"

namespace {

constexpr int STAGES = 4, GROUPS = 2, BAND = 8;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // with 384 threads: 64,512 of 65,536

// Calls `body` with the first row and column of each tile of this block.
template <typename Body>
__device__ __forceinline__ void for_each_tile(const LadderArguments& arguments, Body body) {
  const int tiles = arguments.row_tiles * arguments.column_tiles;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Tile tile = tile_at<BAND>(index, arguments.row_tiles, arguments.column_tiles);
    body(tile.row * 128, tile.column * BN);
  }
}

}  // namespace

// At most one block of three warp groups for each 128 x 256 of c. Dynamic shared memory: four stages of 48
// KiB and their barriers.
extern "C" __global__ void __launch_bounds__(3 * GROUP_THREADS, 1)
matmul_persistent(const __grid_constant__ LadderArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned stages = shared_address(memory);
  const Pipeline<STAGES> pipeline{stages + STAGES * STAGE_BYTES<GROUPS>};
  if (threadIdx.x == 0) pipeline.init(4 * GROUPS);
  __syncthreads();
  RingPosition<STAGES> ring;  // goes on from tile to tile
  const int role = group_index();
  if (role == 0) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (is_issuer())
      for_each_tile(arguments, [&](int row, int column) {
        produce<GROUPS>(arguments, pipeline, ring, stages, row, column);
      });
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    for_each_tile(arguments, [&](int row, int column) {
      float sums[BN / 2];
      consume<GROUPS>(sums, arguments, role - 1, pipeline, ring, stages);
      store_sums(sums, arguments, row + (role - 1) * 64, column);
    });
  }
}
