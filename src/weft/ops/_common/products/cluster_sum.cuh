// The end of a tile of wgmma.cu whose K is divided among the blocks of a cluster (K_PARTS). Included by
// wgmma.cu alone, behind output.cuh.
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
  static_assert(CONSUMERS * K_PARTS * SLOT_BYTES <= STAGES * STAGE_BYTES, "the stages have room for sums");

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
    const int pairs = first_pair(own_part + 1) - first_pair(own_part);
    column += first_pair(own_part) * PAIR_COLUMNS;
    Vector<T, 2> residuals[SHARE_PAIRS][4] = {};  // read while the sums are on their way
    if constexpr (EPILOGUE == RESIDUAL && !ANY_C) {
#pragma unroll
      for (int pair = 0; pair < SHARE_PAIRS; ++pair) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const int of_row = row + accumulator_row(thread, i);
          const int of_column = column + pair * PAIR_COLUMNS + accumulator_column(thread, i);
          if (pair < pairs && of_row < arguments.rows && of_column < arguments.columns)
            residuals[pair][i / 2] = *reinterpret_cast<const Vector<T, 2>*>(
                result.extra + of_row * result.extra_pitch + of_column);
        }
      }
    }
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
      store_pair_of_vectors(result, totals, residuals[pair], row, column + pair * PAIR_COLUMNS);
    }
  }

  // Stores a thread's two vectors of 4 sums in c, from (row, column) of 64 rows and 16 columns on.
  static __device__ __forceinline__ void store_pair_of_vectors(const MatmulSumArguments& result,
                                                               const float (&totals)[8],
                                                               const Vector<T, 2> (&residuals)[4], int row,
                                                               int column) {
    const int thread = threadIdx.x % GROUP_THREADS;
    unsigned words[4] = {}, pre_words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int of_row = row + accumulator_row(thread, i), of_column = column + accumulator_column(thread, i);
      if (of_row >= result.rows || of_column >= result.columns) continue;
      float two[2] = {totals[i], totals[i + 1]};
      if constexpr (ANY_C || sizeof(T) == 4) {
        store_sums(result, two, of_row, of_column);
      } else {  // the same in words
        if constexpr (HAS_BIAS) add(two, *reinterpret_cast<const Vector<T, 2>*>(result.bias + of_column));
        if constexpr (EPILOGUE == ROW_SCALE) {
          two[0] *= result.row_values[of_row];
          two[1] *= result.row_values[of_row];
        }
        if constexpr (EPILOGUE == RESIDUAL) add(two, residuals[i / 2]);
        if constexpr (EPILOGUE == GELU_PRE) pre_words[i / 2] = rounded(two);
        if constexpr (EPILOGUE == GELU || EPILOGUE == GELU_PRE) activate(two);
        words[i / 2] = rounded(two);
      }
    }
    if constexpr (!ANY_C && sizeof(T) == 2) {
      store_transposed(result.c, result, words, row, column);
      if constexpr (EPILOGUE == GELU_PRE) store_transposed(result.extra, result, pre_words, row, column);
    }
  }

  // The same for words of two columns: of a row and the one 8 below, and of these 8 columns on. The four
  // lanes of a row exchange words, so that each has 8 columns of one row: 32 bytes of 16 rows in a warp.
  static __device__ __forceinline__ void store_transposed(T* to, const MatmulSumArguments& result,
                                                          const unsigned (&words)[4], int row, int column) {
    const int lane = threadIdx.x % 32;
    const bool is_odd = lane & 1, is_upper = lane & 2;
    unsigned two[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned own = is_odd ? words[half * 2 + 1] : words[half * 2];
      const unsigned other = __shfl_xor_sync(~0u, is_odd ? words[half * 2] : words[half * 2 + 1], 1);
      two[half][0] = is_odd ? other : own;
      two[half][1] = is_odd ? own : other;
    }
    unsigned own[2], other[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i] = is_upper ? two[1][i] : two[0][i];
      other[i] = __shfl_xor_sync(~0u, is_upper ? two[0][i] : two[1][i], 2);
    }
    row += accumulator_row(threadIdx.x % GROUP_THREADS, 0) + is_odd * 8;
    column += is_upper * 8;
    if (row >= result.rows || column >= result.columns) return;
    *reinterpret_cast<uint4*>(to + (long long)row * result.columns + column) =
        is_upper ? make_uint4(other[0], other[1], own[0], own[1])
                 : make_uint4(own[0], own[1], other[0], other[1]);
  }
};

}  // namespace
