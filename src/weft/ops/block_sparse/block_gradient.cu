// The gradient of the stored blocks of a weight: of each block, grad^T x over all rows, by Hopper's tensor
// cores (wgmma, sm_90a); 16-bit types, sums in float32.
//
// Shapes: grad (rows, N); x (rows, K); output (count, SIDE, SIDE); places, rows (count,): the blocks in the
// order of their columns, with their rows in units of SIDE; col (count,): the column of each block, in the
// order of the values. Blocks of threads that run at the same time so have the same columns of x.
//
// Both factors lie with their rows along K: they are MN-major. Blocks of threads are persistent, as in
// block_linear.cu. A stage has 64 rows of grad and of x. Of a block of 128 the groups compute 64 rows each,
// and share x; of blocks of 64 each group computes one of two blocks that follow each other. Each element is
// one sum over the rows in their order.
//
// Bytes moved in a step: 32 KiB for 2 SIDE^2 64 FLOP of a block: 64 FLOP a byte at SIDE 128, 32 at 64.
#include "hopper/barrier.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "numeric.cuh"

#ifndef SIDE
#define SIDE 128
#define STAGES 6
#endif

using namespace hopper;

namespace {

using T = WEFT_T;
constexpr int CONSUMERS = 2, BK = 64;
constexpr int THREADS = GROUP_THREADS * (1 + CONSUMERS);
constexpr int AT_ONCE = SIDE == 128 ? 1 : CONSUMERS;  // blocks of the weight
// Two boxes of 64 columns of grad, then two of x: the halves of a block of 128, or those of two blocks.
constexpr int X_AT = 2 * BLOCK_BYTES, STAGE_BYTES = 4 * BLOCK_BYTES;
constexpr int BOXES = SIDE / 64, BUFFER_BYTES = BOXES * BLOCK_BYTES;  // of 64 rows of a block
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + CONSUMERS * BUFFER_BYTES;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
static_assert(SIDE == 64 || SIDE == 128, "a group's product has 64 rows");
static_assert(BARRIERS_AT + Pipeline<STAGES>::BYTES <= 227 << 10, "too much shared memory");

}  // namespace

struct alignas(64) GradientArguments {
  TensorMap grad, x, output;
  const int *rows, *places, *col;
  // tiles: of AT_ONCE blocks; steps: of 64 rows, at least 1.
  int tiles, steps, count, row_blocks, column_blocks;
};

namespace {

__device__ __forceinline__ void produce(const GradientArguments& arguments, Pipeline<STAGES> pipeline,
                                        unsigned stages) {
  RingPosition<STAGES> ring;
  tma_prefetch(&arguments.grad);
  tma_prefetch(&arguments.x);
  const unsigned row_blocks = arguments.row_blocks, column_blocks = arguments.column_blocks;
  for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
    int from[2], to[2];  // the first columns of the boxes of grad and of x
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The first place outside stands for what is out of range: its box is zeros.
      const int index = tile * AT_ONCE + (AT_ONCE > 1 ? half : 0);
      const unsigned place = index < arguments.count ? arguments.places[index] : arguments.count;
      const bool is_valid = place < (unsigned)arguments.count;
      const unsigned row = is_valid ? arguments.rows[index] : row_blocks;
      const unsigned column = is_valid ? arguments.col[place] : column_blocks;
      const bool is_inside = row < row_blocks && column < column_blocks;
      const int within = AT_ONCE > 1 ? 0 : half * 64;
      from[half] = (is_inside ? row : row_blocks) * SIDE + within;
      to[half] = (is_inside ? column : column_blocks) * SIDE + within;
    }
    for (int step = 0; step < arguments.steps; ++step, ring.next()) {
      const unsigned stage = stages + ring.stage * STAGE_BYTES, full = pipeline.full(ring.stage);
      pipeline.begin_fill(ring, STAGE_BYTES);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        tma_load(stage + half * BLOCK_BYTES, &arguments.grad, from[half], step * BK, full);
        tma_load(stage + X_AT + half * BLOCK_BYTES, &arguments.x, to[half], step * BK, full);
      }
    }
  }
}

// Writes the products of a tile to `sums`, and leaves the ring behind its last stage.
__device__ __forceinline__ void multiply(float (&sums)[SIDE / 2], int group, int steps,
                                         Pipeline<STAGES> pipeline, RingPosition<STAGES>& ring,
                                         unsigned stages) {
  int previous = -1;
  for (int step = 0; step < steps; ++step) {
    const unsigned grad_at = stages + ring.stage * STAGE_BYTES + group * BLOCK_BYTES;
    const unsigned x_at = stages + ring.stage * STAGE_BYTES + X_AT + (AT_ONCE > 1 ? group * BLOCK_BYTES : 0);
    pipeline.wait_full(ring);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / 16; ++k)
      Wgmma<T, MN_MAJOR, MN_MAJOR, SIDE>::run(
          sums, descriptor<MN_MAJOR>(grad_at + k * K_STEP_BYTES<MN_MAJOR>),
          descriptor<MN_MAJOR>(x_at + k * K_STEP_BYTES<MN_MAJOR>), step > 0 || k > 0);
    wgmma_commit();
    // The products of this step run on; those of the step before have read their stage.
    wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) pipeline.release(previous);
    previous = ring.stage;
    ring.next();
  }
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) pipeline.release(previous);
}

// Stores the 64 x SIDE sums of a group at row `row` of all blocks below each other.
__device__ __forceinline__ void store(const float (&sums)[SIDE / 2], const GradientArguments& arguments,
                                      int group, unsigned buffer, int row) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP_THREADS / 32;
  const int matrix_row = warp * 16 + lane % 16;
  // The storing thread's copies have read the buffer; then everyone may overwrite it.
  if (is_storer()) tma_wait_read<0>();
  named_barrier(1 + group, GROUP_THREADS);
#pragma unroll
  for (int pair = 0; pair < SIDE / 16; ++pair) {  // 16 columns
    // Matrices of 8 x 8: rows 0 to 7 and 8 to 15 of columns 0 to 7, then those of columns 8 to 15.
    unsigned words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word)
      words[word] = rounded_pair<T>(sums[pair * 8 + word * 2], sums[pair * 8 + word * 2 + 1]);
    const int chunk = (pair % 4 * 2 + lane / 16) ^ (matrix_row & 7);
    store_matrices(buffer + pair / 4 * BLOCK_BYTES + matrix_row * 128 + chunk * 16, words[0], words[1],
                   words[2], words[3]);
  }
  fence_async_proxy();
  named_barrier(1 + group, GROUP_THREADS);
  if (is_storer()) {
#pragma unroll
    for (int box = 0; box < BOXES; ++box)
      tma_store(&arguments.output, buffer + box * BLOCK_BYTES, box * 64, row);
    tma_commit();
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    block_gradient(const __grid_constant__ GradientArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned stages = shared_address(memory);
  const Pipeline<STAGES> pipeline{stages + BARRIERS_AT};
  if (threadIdx.x == 0) pipeline.init(CONSUMERS * 4);
  __syncthreads();
  const int role = group_index();
  if (role == 0) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (is_issuer()) produce(arguments, pipeline, stages);
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    const int group = role - 1;
    const unsigned buffer = stages + STAGES * STAGE_BYTES + group * BUFFER_BYTES;
    RingPosition<STAGES> ring;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
      float sums[SIDE / 2];
      multiply(sums, group, arguments.steps, pipeline, ring, stages);
      const int index = tile * AT_ONCE + (AT_ONCE > 1 ? group : 0);
      if (index >= arguments.count) continue;  // the last pair may be one block
      const unsigned place = arguments.places[index];
      if (place < (unsigned)arguments.count)
        store(sums, arguments, group, buffer, place * SIDE + (AT_ONCE > 1 ? 0 : group * 64));
    }
    if (is_storer()) tma_wait<0>();  // before this block's shared memory is given away
  }
}
