// What the wgmma steps of the ladder share: c (rows, columns) = a b, 256 columns of c a block, 64 of K at
// a time. a has K as its contiguous dimension, b its columns. Tiles are in shared memory as the copy
// engine writes them.
#pragma once
#include "hopper/barrier.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "numeric.cuh"

using namespace hopper;

struct alignas(64) LadderArguments {
  TensorMap a, b;
  WEFT_T* c;
  int rows, columns, k_steps;  // steps of 64 along K, at least 1
  int row_tiles, column_tiles;
};

namespace {

using T = WEFT_T;
constexpr int BN = 256, BK = 64, B_BYTES = BN * 128;
// Bytes of one step's tiles for blocks of GROUPS x 64 rows: a, then b.
template <int GROUPS> constexpr int A_BYTES = GROUPS * 64 * 128;
template <int GROUPS> constexpr int STAGE_BYTES = A_BYTES<GROUPS> + B_BYTES;

// Asks the copy engine for the tiles of step `step`. They count on the barrier `full`, which expects them.
template <int GROUPS>
__device__ __forceinline__ void load_tiles(const LadderArguments& arguments, unsigned to, int row, int column,
                                           int step, unsigned full) {
  tma_load(to, &arguments.a, step * BK, row, full);
#pragma unroll
  for (int block = 0; block < BN / 64; ++block)
    tma_load(to + A_BYTES<GROUPS> + block * BLOCK_BYTES, &arguments.b, column + block * 64, step * BK, full);
}

// Starts the products of one step: 64 rows of a at `a_at` with the tile of b at `b_at`, as one group.
__device__ __forceinline__ void start_products(float (&sums)[BN / 2], unsigned a_at, unsigned b_at,
                                               bool add) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BK / 16; ++k)
    Wgmma<T, K_MAJOR, MN_MAJOR, BN>::run(sums, descriptor<K_MAJOR>(a_at + k * K_STEP_BYTES<K_MAJOR>),
                                         descriptor<MN_MAJOR>(b_at + k * K_STEP_BYTES<MN_MAJOR>),
                                         add || k > 0);
  wgmma_commit();
}

// Stores the 64 x 256 sums of a warp group from registers: four lanes write 16 adjacent bytes of a row.
__device__ __forceinline__ void store_sums(const float (&sums)[BN / 2], const LadderArguments& arguments,
                                           int first_row, int first_column) {
  const int thread = threadIdx.x % GROUP_THREADS;
#pragma unroll
  for (int i = 0; i < BN / 2; i += 2) {
    const int row = first_row + accumulator_row(thread, i);
    const int column = first_column + accumulator_column(thread, i);
    if (row < arguments.rows && column < arguments.columns)
      *reinterpret_cast<Vector<T, 2>*>(arguments.c + (long long)row * arguments.columns + column) = {
          from_float<T>(sums[i]), from_float<T>(sums[i + 1])};
  }
}

// Producer of steps 14 to 16: fills the ring with all steps of one tile of c.
template <int GROUPS, int STAGES>
__device__ __forceinline__ void produce(const LadderArguments& arguments, Pipeline<STAGES> pipeline,
                                        RingPosition<STAGES>& ring, unsigned stages, int row, int column) {
  for (int step = 0; step < arguments.k_steps; ++step, ring.next()) {
    pipeline.begin_fill(ring, STAGE_BYTES<GROUPS>);
    load_tiles<GROUPS>(arguments, stages + ring.stage * STAGE_BYTES<GROUPS>, row, column, step,
                       pipeline.full(ring.stage));
  }
}

// Consumer of steps 14 to 16: group `group` adds the products of all steps of its 64 rows of one tile of
// c.
template <int GROUPS, int STAGES>
__device__ __forceinline__ void consume(float (&sums)[BN / 2], const LadderArguments& arguments, int group,
                                        Pipeline<STAGES> pipeline, RingPosition<STAGES>& ring,
                                        unsigned stages) {
  int previous = -1;
  for (int step = 0; step < arguments.k_steps; ++step, ring.next()) {
    const unsigned stage = stages + ring.stage * STAGE_BYTES<GROUPS>;
    pipeline.wait_full(ring);
    start_products(sums, stage + group * 64 * 128, stage + A_BYTES<GROUPS>, step > 0);
    // The products of this step run on; those of the step before have read their stage.
    wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) pipeline.release(previous);
    previous = ring.stage;
  }
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) pipeline.release(previous);
}

}  // namespace
