// y = x W^T + bias for a weight of stored blocks of 64 or 128 (BSR), and with TRANSPOSED y = x W, by Hopper's
// tensor cores (wgmma, sm_90a); 16-bit types, sums in float32.
//
// Shapes: values (count, SIDE, SIDE); x (rows, K); y (rows, N); starts (N / SIDE + 1,): where each row of
// blocks begins; across (count,): its columns of x in units of SIDE; with TRANSPOSED places (count,): the
// block in values, which is read transposed.
//
// Blocks of threads compute tiles of y^T = W x^T: the weight is the first factor, so that a row of blocks is
// the 64 or 128 rows of a tile, and as many rows of x as registers hold (BN for a group) are its columns.
// They are persistent and have three warp groups, as in products/wgmma.cu. One thread of group 0 walks the
// row's blocks and copies 64 of their columns, with the columns of x that they name, into a stage of a ring.
// Groups 1 and 2 multiply: of blocks of 128 they take 64 rows each of the same BN rows of x; of blocks of 64
// they take the whole block, with BN rows of x each. Every block of a cluster has the same row of blocks and
// other rows of x: each loads a part of W for all. The copy engine fills what lies outside of x with zeros,
// and writes nothing outside of y. Each element of y is one sum over the row's blocks in their order.
//
// Bytes moved in a step: SIDE 128 of W and 128 of each row of x, for 2 SIDE 64 FLOP of each row of x: x is
// read once for each block, so that small blocks are bound by the L2 cache: 64 FLOP a byte of x at SIDE 64.
// Source of the design: NVIDIA's CUTLASS, kernels for sm_90.
#include "hopper/barrier.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/transposed_store.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "numeric.cuh"

#ifndef BN
#define BN 256
#define SIDE 128
#define STAGES 4
#define CLUSTER 1
#define TRANSPOSED 0
#endif

using namespace hopper;

namespace {

using T = WEFT_T;
constexpr int CONSUMERS = 2, BK = 64, BAND = 8, PARTS = SIDE / BK;  // PARTS: steps of a block
constexpr int THREADS = GROUP_THREADS * (1 + CONSUMERS);
constexpr int W_MAJOR = TRANSPOSED ? MN_MAJOR : K_MAJOR;
constexpr int X_TILES = SIDE == 128 ? 1 : CONSUMERS;  // of BN rows of x in a stage
constexpr int COLUMNS = BN * X_TILES;                  // of a tile of y^T
constexpr int W_BYTES = SIDE * 128, X_BYTES = BN * 128, STAGE_BYTES = W_BYTES + X_TILES * X_BYTES;
// Rows of a box of W that one block of the cluster loads: of W itself, or of its K.
constexpr int BOX_ROWS = (TRANSPOSED ? BK : SIDE) / CLUSTER;
constexpr unsigned short ALL_BLOCKS = (1 << CLUSTER) - 1;
constexpr int BUFFER_BYTES = TransposedBuffer<BN>::BYTES;
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + CONSUMERS * BUFFER_BYTES;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // with 384 threads: 64,512 of 65,536
static_assert(SIDE == 64 || SIDE == 128, "a group's product has 64 rows");
static_assert(BN % 64 == 0 && BARRIERS_AT + Pipeline<STAGES>::BYTES <= 227 << 10, "too much shared memory");
static_assert(BOX_ROWS % 8 == 0, "a part begins at an atom of the swizzle");

}  // namespace

struct alignas(64) BlockArguments {
  TensorMap values, x, y;
  const int *starts, *across, *places;
  const WEFT_T* bias;  // (outputs,); not read with TRANSPOSED
  // row_tiles: rows of blocks; column_tiles: of COLUMNS rows of x, for all blocks of a cluster together.
  int row_tiles, column_tiles, count, column_blocks;
};

namespace {

// A row of blocks from `begin` to `end`. Starts that do not rise from 0 to `count` are no addresses.
struct Range {
  int begin, end;
  __device__ __forceinline__ int steps() const { return max(end - begin, 0) * PARTS; }
};

__device__ __forceinline__ Range range_of(const BlockArguments& arguments, int row) {
  return {max(arguments.starts[row], 0), min(arguments.starts[row + 1], arguments.count)};
}

// Calls `body(row, column)` with the row of blocks and the first row of x of each tile.
template <typename Body>
__device__ __forceinline__ void for_each_tile(const BlockArguments& arguments, Body body) {
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int tiles = arguments.row_tiles * arguments.column_tiles;
  for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
    const Tile tile = tile_at<BAND>(index, arguments.row_tiles, arguments.column_tiles);
    body(tile.row, (tile.column * CLUSTER + rank) * COLUMNS);
  }
}

// Loads 64 columns of a block of W: this block's share, for all blocks of the cluster.
__device__ __forceinline__ void load_weight(unsigned to, const TensorMap* map, int place, int part, int rank,
                                            unsigned full) {
  to += rank * BOX_ROWS * 128;
  // K-major: one box of rows of W. MN-major: a row has 64 elements of the M of the product, and a block of
  // 128 is two boxes beside each other.
#pragma unroll
  for (int box = 0; box < (TRANSPOSED ? PARTS : 1); ++box) {
    const int x = TRANSPOSED ? box * 64 : part * BK;
    const int y = place * SIDE + (TRANSPOSED ? part * BK : 0) + rank * BOX_ROWS;
    if constexpr (CLUSTER == 1) tma_load(to + box * BLOCK_BYTES, map, x, y, full);
    else tma_load_multicast(to + box * BLOCK_BYTES, map, x, y, full, ALL_BLOCKS);
  }
}

__device__ __forceinline__ void produce(const BlockArguments& arguments, Pipeline<STAGES> pipeline,
                                        unsigned stages) {
  RingPosition<STAGES> ring;
  tma_prefetch(&arguments.values);
  tma_prefetch(&arguments.x);
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const unsigned columns = arguments.column_blocks, count = arguments.count;
  for_each_tile(arguments, [&](int row, int column) {
    const Range range = range_of(arguments, row);
    for (int block = range.begin; block < range.end; ++block) {
      // The first place outside stands for every index out of range: its box is zeros.
      const int across = min((unsigned)arguments.across[block], columns);
      const int place = TRANSPOSED ? min((unsigned)arguments.places[block], count) : block;
#pragma unroll 1  // unrolled, one register of the cluster's program was spilled
      for (int part = 0; part < PARTS; ++part, ring.next()) {
        const unsigned w_at = stages + ring.stage * STAGE_BYTES, x_at = w_at + W_BYTES;
        const unsigned full = pipeline.full(ring.stage);
        pipeline.begin_fill(ring, STAGE_BYTES);  // all parts of W arrive here
        load_weight(w_at, &arguments.values, place, part, rank, full);
#pragma unroll
        for (int tile = 0; tile < X_TILES; ++tile)
          tma_load(x_at + tile * X_BYTES, &arguments.x, across * SIDE + part * BK, column + tile * BN, full);
      }
    }
  });
}

// Adds the products of `steps` steps to `sums`, and leaves the ring behind its last stage.
__device__ __forceinline__ void multiply(float (&sums)[BN / 2], int group, int steps,
                                         Pipeline<STAGES> pipeline, RingPosition<STAGES>& ring,
                                         unsigned stages) {
  int previous = -1;
  for (int step = 0; step < steps; ++step) {
    // Of blocks of 128 a group has its own 64 rows of W, of blocks of 64 its own rows of x.
    const unsigned stage = stages + ring.stage * STAGE_BYTES;
    const unsigned w_at = stage + (SIDE == 128 ? group * BLOCK_BYTES : 0);
    const unsigned x_at = stage + W_BYTES + (X_TILES > 1 ? group * X_BYTES : 0);
    pipeline.wait_full(ring);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / 16; ++k)
      Wgmma<T, W_MAJOR, K_MAJOR, BN>::run(sums, descriptor<W_MAJOR>(w_at + k * K_STEP_BYTES<W_MAJOR>),
                                          descriptor<K_MAJOR>(x_at + k * K_STEP_BYTES<K_MAJOR>), 1);
    wgmma_commit();
    // The products of this step run on; those of the step before have read their stage.
    wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(previous);
    previous = ring.stage;
    ring.next();
  }
  wgmma_wait<0>();
  if (previous >= 0 && threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(previous);
}

// Stores the sums of a group as BN rows of y from (column, row) on.
__device__ __forceinline__ void store(const float (&sums)[BN / 2], const BlockArguments& arguments, int group,
                                      unsigned buffer, int row, int column) {
  const int thread = threadIdx.x % GROUP_THREADS;
  float bias[2] = {};
  if constexpr (!TRANSPOSED) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      bias[half] = to_float(arguments.bias[row + accumulator_row(thread, half * 2)]);
  }
  store_transposed<T, BN>(sums, bias, &arguments.y, group, buffer, row, column);
}

}  // namespace

extern "C" __global__ void CLUSTER_DIMENSIONS(CLUSTER) __launch_bounds__(THREADS, 1)
    block_linear(const __grid_constant__ BlockArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned stages = shared_address(memory);
  const Pipeline<STAGES> pipeline{stages + BARRIERS_AT};
  if (threadIdx.x == 0) pipeline.init(CONSUMERS * 4 * CLUSTER);
  if constexpr (CLUSTER > 1) cluster_barrier();  // another block's copies count on this block's barriers
  else __syncthreads();
  const int role = group_index();
  if (role == 0) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (is_issuer()) produce(arguments, pipeline, stages);
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    const int group = role - 1;
    const unsigned buffer = stages + STAGES * STAGE_BYTES + group * BUFFER_BYTES;
    RingPosition<STAGES> ring;
    for_each_tile(arguments, [&](int row, int column) {
      float sums[BN / 2] = {};  // a row without blocks has no product that would clear them
      multiply(sums, group, range_of(arguments, row).steps(), pipeline, ring, stages);
      store(sums, arguments, group, buffer, row * SIDE + (SIDE == 128 ? group * 64 : 0),
            column + (X_TILES > 1 ? group * BN : 0));
    });
    if (is_storer()) tma_wait<0>();  // before this block's shared memory is given away
  }
  // Until the others arrive no more at this block's barriers.
  if constexpr (CLUSTER > 1) cluster_barrier();
}
