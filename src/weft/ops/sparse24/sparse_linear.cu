// y = x W^T + bias by Hopper's sparse tensor cores (wgmma.sp, sm_90a), W 2:4 sparse, 16-bit types, sums in
// float32.
//
// The sparse factor is the first one of a product: blocks compute y^T = W x^T. They are persistent and have
// three warp groups, as in products/wgmma.cu. One thread of group 0 copies tiles into a ring of STAGES
// stages. Groups 1 and 2 multiply, and store the transposed sums through buffers of their own. A stage has 64
// columns of W and x: two products of 32. Of W these are 64 bytes of a row, two of each four elements, and
// 1 KB of metadata for the block's 128 rows, of which each lane reads a word for 64 rows (pattern.py has the
// order). The copy engine fills what lies outside of W and x with zeros, and writes nothing outside of y.
// Each element of y is one sum over K in a fixed order.
//
// Without PINGPONG the groups share each tile of 128 rows of W by BN rows of x, 64 rows of W each. With
// PINGPONG they take tiles alternately: one multiplies while the other stores, which pays where K is short.
// The blocks of a cluster compute rows of W below each other. They share a tile of x: each loads a part of it
// for all. Bytes of a stage: 8 KB of W, 128 BN of x, 1 KB of metadata.
// Source of the design: NVIDIA's CUTLASS, the sparse kernel for sm_90.
#include "hopper/barrier.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/transposed_store.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "hopper/wgmma_sparse_shapes.cuh"
#include "numeric.cuh"

#ifndef BN
#define BN 256
#define STAGES 4
#define CLUSTER 1
#define PINGPONG 0
#endif

using namespace hopper;

namespace {

using T = WEFT_T;
constexpr int CONSUMERS = 2, BM = 64 * CONSUMERS, BK = 64, BAND = 8;
constexpr int THREADS = GROUP_THREADS * (1 + CONSUMERS);
constexpr int VALUE_ROW = BK / 2 * sizeof(T);  // bytes: a swizzle of 64
constexpr int VALUE_BYTES = BM * VALUE_ROW, X_BYTES = BN * BK * sizeof(T), CODE_BYTES = BM / 16 * 128;
constexpr int STAGE_BYTES = VALUE_BYTES + X_BYTES + CODE_BYTES;
constexpr int X_ROWS = BN / CLUSTER;  // of the part that a block loads
constexpr unsigned short ALL_BLOCKS = (1 << CLUSTER) - 1;
constexpr int BUFFER_BYTES = TransposedBuffer<BN>::BYTES;
// A group has this many blocks of 64 rows of W of a tile: its own, or with PINGPONG all.
constexpr int ROW_BLOCKS = PINGPONG ? CONSUMERS : 1;
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + CONSUMERS * BUFFER_BYTES;
constexpr int TURNS_AT = BARRIERS_AT + Pipeline<STAGES>::BYTES;  // a barrier of each group: it may multiply
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // with 384 threads: 64,512 of 65,536
static_assert(BN % 64 == 0 && TURNS_AT + CONSUMERS * 8 <= 227 << 10, "too much shared memory");
static_assert(STAGE_BYTES % 1024 == 0 && X_ROWS % 64 == 0, "tiles are whole atoms of the swizzle");

}  // namespace

struct alignas(64) SparseArguments {
  TensorMap values, x, y;
  const unsigned* metadata;  // (k_steps, row_blocks, 32)
  const WEFT_T* bias;        // (outputs,)
  // row_tiles: of 128 outputs for each block of a cluster; column_tiles: of BN rows of x; k_steps: of 64, at
  // least 1; row_blocks: of 16 outputs, a multiple of 8.
  int row_tiles, column_tiles, k_steps, row_blocks, outputs;
};

namespace {

// Calls `body(row, column)` with the first output and the first row of x of each tile of this block.
template <typename Body>
__device__ __forceinline__ void for_each_tile(const SparseArguments& arguments, Body body) {
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int tiles = arguments.row_tiles * arguments.column_tiles;
  for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
    const Tile tile = tile_at<BAND>(index, arguments.row_tiles, arguments.column_tiles);
    body((tile.row * CLUSTER + rank) * BM, tile.column * BN);
  }
}

__device__ __forceinline__ void produce(const SparseArguments& arguments, Pipeline<STAGES> pipeline,
                                        unsigned stages) {
  RingPosition<STAGES> ring;
  tma_prefetch(&arguments.values);
  tma_prefetch(&arguments.x);
  const int part = CLUSTER > 1 ? (int)cluster_rank() * X_ROWS : 0;
  for_each_tile(arguments, [&](int row, int column) {
    // A cluster may have a tile below the last one. Its products are never stored, but its codes must be
    // valid.
    const int row_block = min(row / 16, arguments.row_blocks - BM / 16);
    const unsigned* codes = arguments.metadata + (long long)row_block * 32;
    for (int step = 0; step < arguments.k_steps; ++step, ring.next()) {
      const unsigned values_at = stages + ring.stage * STAGE_BYTES, x_at = values_at + VALUE_BYTES;
      const unsigned full = pipeline.full(ring.stage);
      pipeline.begin_fill(ring, STAGE_BYTES);  // all parts of x arrive here
      tma_load(values_at, &arguments.values, step * (BK / 2), row, full);
      if constexpr (CLUSTER == 1) tma_load(x_at, &arguments.x, step * BK, column, full);
      else tma_load_multicast(x_at + part * 128, &arguments.x, step * BK, column + part, full, ALL_BLOCKS);
      bulk_load(x_at + X_BYTES, codes, CODE_BYTES, full);
      codes += (long long)arguments.row_blocks * 32;
    }
  });
}

// Issues the products of one step, whose codes a thread loads into `words`. These must not change before the
// products are complete.
__device__ __forceinline__ void issue_step(float (&sums)[ROW_BLOCKS][BN / 2], unsigned (&words)[ROW_BLOCKS],
                                           unsigned stage, int group, bool accumulate) {
  const int first = PINGPONG ? 0 : group;  // block of 64 rows
  const unsigned values_at = stage + first * 64 * VALUE_ROW, x_at = stage + VALUE_BYTES;
  const unsigned codes_at = x_at + X_BYTES + (first * GROUP_THREADS + threadIdx.x % GROUP_THREADS) * 4;
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; ++block)
    words[block] = load_word(codes_at + block * GROUP_THREADS * 4);
  wgmma_fence();
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; ++block) {
    // 16 of the values, 32 bytes, and 32 columns of x, 64 bytes, each.
    const unsigned block_at = values_at + block * 64 * VALUE_ROW;
    WgmmaSparse<T, BN, 0>::run(sums[block], descriptor_64(block_at), descriptor<K_MAJOR>(x_at), words[block],
                               accumulate);
    WgmmaSparse<T, BN, 1>::run(sums[block], descriptor_64(block_at + 32), descriptor<K_MAJOR>(x_at + 64),
                               words[block], 1);
  }
  wgmma_commit();
}

// Writes the products of one tile to `sums`, and leaves the ring behind its last stage. Two steps at a time:
// each has words of its own, since the products of a step run on while those of the next are issued.
__device__ __forceinline__ void multiply(float (&sums)[ROW_BLOCKS][BN / 2], int group, int k_steps,
                                         Pipeline<STAGES> pipeline, RingPosition<STAGES>& ring,
                                         unsigned stages) {
  int previous = -1;
  unsigned even[ROW_BLOCKS] = {}, odd[ROW_BLOCKS] = {};
  const auto pin = [](unsigned (&words)[ROW_BLOCKS]) {
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) pin_register(words[block]);
  };
  const auto step = [&](unsigned (&words)[ROW_BLOCKS], unsigned (&older)[ROW_BLOCKS], bool accumulate) {
    pipeline.wait_full(ring);
    issue_step(sums, words, stages + ring.stage * STAGE_BYTES, group, accumulate);
    // The products of this step run on; those of the step before have read their stage and their words.
    wgmma_wait<1>();
    pin(older);
    if (previous >= 0 && threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(previous);
    previous = ring.stage;
    ring.next();
  };
  for (int done = 0; done < k_steps; done += 2) {
    step(even, odd, done > 0);
    if (done + 1 < k_steps) step(odd, even, true);
  }
  // The last products are queued, and all stages of this tile have been full: the other group's may follow.
  if (PINGPONG && threadIdx.x % 32 == 0) mbarrier_arrive(stages + TURNS_AT + (group ^ 1) * 8);
  wgmma_wait<0>();
  pin(even);
  pin(odd);
  if (threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(previous);
}

// Stores the sums of 64 outputs as BN rows of y from (column, row) on.
__device__ __forceinline__ void store(const float (&sums)[BN / 2], const SparseArguments& arguments,
                                      int group, unsigned buffer, int row, int column) {
  const int thread = threadIdx.x % GROUP_THREADS;
  float bias[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int output = row + accumulator_row(thread, half * 2);
    bias[half] = output < arguments.outputs ? to_float(arguments.bias[output]) : 0.0f;
  }
  store_transposed<T, BN>(sums, bias, &arguments.y, group, buffer, row, column);
}

}  // namespace

extern "C" __global__ void CLUSTER_DIMENSIONS(CLUSTER) __launch_bounds__(THREADS, 1)
    sparse_linear(const __grid_constant__ SparseArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned stages = shared_address(memory);
  const Pipeline<STAGES> pipeline{stages + BARRIERS_AT};
  if (threadIdx.x == 0) {
    for (int group = 0; group < CONSUMERS; ++group) mbarrier_init(stages + TURNS_AT + group * 8, 4);
    pipeline.init((PINGPONG ? 1 : CONSUMERS) * 4 * CLUSTER);
  }
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
    int index = 0;
    for_each_tile(arguments, [&](int row, int column) {
      const int turn = index++;
      if (PINGPONG && turn % CONSUMERS != group) return ring.skip(arguments.k_steps);
      // The first turn is group 0's: a fresh barrier lets the opposite parity pass.
      if constexpr (PINGPONG)
        wait(stages + TURNS_AT + group * 8, (turn / CONSUMERS & 1) ^ (group == 0 ? 1 : 0));
      float sums[ROW_BLOCKS][BN / 2];
      multiply(sums, group, arguments.k_steps, pipeline, ring, stages);
#pragma unroll
      for (int block = 0; block < ROW_BLOCKS; ++block)
        store(sums[block], arguments, group, buffer, row + (PINGPONG ? block : group) * 64, column);
    });
    if (is_storer()) tma_wait<0>();  // before this block's shared memory is given away
  }
  // Until the others arrive no more at this block's barriers.
  if constexpr (CLUSTER > 1) cluster_barrier();
}
