// Step 12: the copy engine and wgmma, one after the other.
//
// One thread asks the copy engine for 64 x 64 of a and 64 x 256 of b; four warps wait for them, and
// multiply them by four asynchronous instructions that read both factors from shared memory. No thread
// computes an address of an element or holds a factor in a register. Two blocks on an SM overlap each
// other's waiting; that is all.
#include "wgmma_tiles.cuh"

// One block of four warps for each 64 x 256 of c, tiles row by row. Dynamic shared memory: a tile of each
// operand (40 KiB) and one barrier.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
matmul_wgmma(const __grid_constant__ LadderArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned tiles = shared_address(memory), full = tiles + STAGE_BYTES<1>;
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int row = blockIdx.x / arguments.column_tiles * 64;
  const int column = blockIdx.x % arguments.column_tiles * BN;
  float sums[BN / 2];
  for (int step = 0; step < arguments.k_steps; ++step) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(full, STAGE_BYTES<1>);
      load_tiles<1>(arguments, tiles, row, column, step, full);
    }
    wait(full, step & 1);
    start_products(sums, tiles, tiles + A_BYTES<1>, step > 0);
    wgmma_wait<0>();
    __syncthreads();  // all warps' products have read the tiles
  }
  store_sums(sums, arguments, row, column);
}
