// The end of a tile of wgmma.cu whose K is divided among the blocks of a cluster (K_PARTS). Included
// by wgmma.cu alone, behind output.cuh.
//
// Each block finishes a share of the tile's columns. From their registers the others send it their sums of
// that share, into the stages of its pipeline: these are free when all of its products are complete, which
// every block hears through a barrier of its own. The share's owner adds the parts in the order of K, so that
// the same product has the same bits each time, and stores the epilogue's results.
// No block reads another's memory. A block ends when all that is sent to it has come, so that no cluster
// barrier is needed at the end: its release would wait for all stores before it.
#pragma once
#include "output.cuh"

namespace {

struct ClusterSum {
  const MatmulArguments& arguments;
  int group;
  unsigned stages;

  static constexpr int PAIR_COLUMNS = 16, PAIRS = BN / PAIR_COLUMNS;  // of two vectors of 4 sums of a thread
  static constexpr int SHARE_PAIRS = (PAIRS + K_PARTS - 1) / K_PARTS;  // at most
  static constexpr int VECTOR_BYTES = GROUP_THREADS * 16;              // of one vector of each thread
  static constexpr int SLOT_BYTES = SHARE_PAIRS * 2 * VECTOR_BYTES;    // from one block, for one group
  // Barriers: each group has received the others' sums; all blocks' products are complete.
  static constexpr int RECEIVED_AT = TURNS_AT, READY_AT = RESIDUALS_AT;
  static_assert(PAIRS >= K_PARTS, "each block has columns");
  static_assert(CONSUMERS * K_PARTS * SLOT_BYTES <= STAGES * STAGE_BYTES, "the stages have room for the sums");

  // The first of the pairs of vectors that the block with this part of K finishes.
  static __device__ __forceinline__ constexpr int first_pair(int part) { return PAIRS * part / K_PARTS; }

  // The rank of the block with another part of K of this block's tile.
  static __device__ __forceinline__ unsigned rank_of(int part) { return part * SHARERS + sharer(); }

  // One thread calls it, before the cluster barrier at the kernel's beginning.
  static __device__ __forceinline__ void init(unsigned stages) {
    const int part = part_of_block(), pairs = first_pair(part + 1) - first_pair(part);
    mbarrier_init(stages + READY_AT, K_PARTS * CONSUMERS * 4);
    for (int group = 0; group < CONSUMERS; ++group) {
      mbarrier_init(stages + RECEIVED_AT + group * 8, 1);
      mbarrier_arrive_expect(stages + RECEIVED_AT + group * 8, (K_PARTS - 1) * pairs * 2 * VECTOR_BYTES);
    }
  }

  // Place of this thread's first vector among the sums of a part of K.
  __device__ __forceinline__ unsigned slot(int part) const {
    return stages + (group * K_PARTS + part) * SLOT_BYTES + threadIdx.x % GROUP_THREADS * 16;
  }

  // Sends each block its share; this block's own share goes to its place by ordinary stores. Blocks take
  // turns as receivers, so that they do not all wait for one.
  __device__ __forceinline__ void send(const float (&sums)[BN / 2], int part) const {
    const unsigned own = slot(part), received = stages + RECEIVED_AT + group * 8;
#pragma unroll
    for (int vector = 0; vector < SHARE_PAIRS * 2; ++vector) {
#pragma unroll
      for (int to = 0; to < K_PARTS; ++to) {
        const int i = (first_pair(to) * 2 + vector) * 4;
        if (i >= first_pair(to + 1) * 8) continue;
        if (to == part)
          store_four(own + vector * VECTOR_BYTES, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        else
          send_four(in_block(own, rank_of(to)) + vector * VECTOR_BYTES, in_block(received, rank_of(to)),
                    sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
      }
    }
  }

  // Adds the parts of 64 x BN sums from (row, column) on over the parts of K, and stores this block's share.
  __device__ __forceinline__ void store(const float (&sums)[BN / 2], int row, int column) const {
    const int own_part = part_of_block(), thread = threadIdx.x % GROUP_THREADS;
    if (threadIdx.x % 32 == 0)
      for (int part = 0; part < K_PARTS; ++part) mbarrier_arrive_at(stages + READY_AT, rank_of(part));
    wait(stages + READY_AT, 0);
    send(sums, own_part);
    const MatmulSumArguments result{nullptr,
                                    arguments.c_elements,
                                    arguments.extra_elements,
                                    arguments.bias,
                                    arguments.row_values,
                                    arguments.extra_pitch,
                                    0,
                                    0,
                                    0,
                                    0,
                                    arguments.rows,
                                    arguments.columns};
    const int first = first_pair(own_part), pairs = first_pair(own_part + 1) - first;
    wait(stages + RECEIVED_AT + group * 8, 0);
#pragma unroll
    for (int pair = 0; pair < SHARE_PAIRS; ++pair) {
      if (pair >= pairs) break;
      float totals[8] = {};
#pragma unroll
      for (int part = 0; part < K_PARTS; ++part) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float four[4];
          load_four(four, slot(part) + (pair * 2 + half) * VECTOR_BYTES);
#pragma unroll
          for (int i = 0; i < 4; ++i) totals[half * 4 + i] += four[i];
        }
      }
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int of_row = row + accumulator_row(thread, i);
        const int of_column = column + (first + pair) * PAIR_COLUMNS + accumulator_column(thread, i);
        if (of_row >= arguments.rows || of_column >= arguments.columns) continue;
        float two[2] = {totals[i], totals[i + 1]};
        store_sums(result, two, of_row, of_column);
      }
    }
  }
};

}  // namespace
