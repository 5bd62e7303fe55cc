// c = epilogue(a b) by Hopper's tensor cores (wgmma, sm_90a): float16 and bfloat16, or float32 truncated to
// tf32 (both operands K-major, no epilogue); sums in float32.
//
// Persistent blocks of three warp groups. One thread of group 0 copies tiles of a and b by the copy engine
// into a ring of STAGES stages; groups 1 and 2 multiply from shared memory, and store 128 x BN of c through
// buffers of their own by the copy engine, while the producer already fetches the next tile. K is taken 128
// bytes at a time; the copy engine fills what lies outside of a and b with zeros, and writes nothing outside
// of c.
// Each element of c is one sum over K in a fixed order, whatever the size of the product.
//
// Without PINGPONG the groups share each tile, 64 rows each, and both store it at the same time. With
// PINGPONG they take tiles alternately: one multiplies while the other has its epilogue. This pays where K
// is short or the epilogue is long. A cluster of blocks shares tiles of b, or with SHARE_A tiles of a.
// With CONSUMER_GROUPS 1 tiles have 64 rows, two blocks run on an SM, and no registers are moved: for
// products that have few tiles, where the bytes that each SM reads take the time. With 3 they have 192 rows.
// With SPLIT, K of the last tiles, which are fewer than SMs, is divided into equal parts that different
// blocks take: each writes its sums in float32, and a second kernel adds them in the order of K.
// With K_PARTS > 1 so many blocks of a cluster compute the same tile, each a part of K, and add their sums in
// the order of K through each other's shared memory (cluster_sum.cuh): for few tiles and a long K. Blocks of
// the same part share a or b, if there are several. The grid has a cluster for each tile.
// With ANY_C the rows of c are contiguous and begin anywhere: they are stored element by element.
//
// EPILOGUE (epilogue.cuh) is computed on the float32 sums, which are rounded once.
// Source of the design: NVIDIA's CUTLASS, "cooperative" and "pingpong" kernels for sm_90.
#define OVERLAP 1
#include "hopper/barrier.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "hopper/wgmma_tf32_shapes.cuh"
#include "epilogue.cuh"
#include "overlap.cuh"

#ifndef BN
#define BN 256
#define STAGES 4
#define CLUSTER 1
#define SHARE_A 0
#define PINGPONG 0
#define TILE_BAND 8
#define CONSUMER_GROUPS 2
#define ANY_C 0
#define SPLIT 0
#define K_PARTS 1
#define A_MN 0
#define B_MN 1
#endif

using namespace hopper;

namespace {

constexpr int CONSUMERS = CONSUMER_GROUPS, BM = 64 * CONSUMERS, BK = 128 / sizeof(T), BAND = TILE_BAND;
constexpr int THREADS = GROUP_THREADS * (1 + CONSUMERS), BLOCKS_PER_SM = CONSUMERS == 1 ? 2 : 1;
constexpr int A_BYTES = BM * 128, B_BYTES = BN * 128, STAGE_BYTES = A_BYTES + B_BYTES;
// A group has this many blocks of 64 rows of a tile: its own, or with PINGPONG all.
constexpr int ROW_BLOCKS = PINGPONG ? CONSUMERS : 1;
// The blocks of a cluster compute tiles below each other, and each loads a share of their common tile of b;
// with SHARE_A they compute tiles beside each other, and share a.
constexpr int SHARERS = CLUSTER / K_PARTS;
constexpr int A_BLOCKS = SHARE_A ? SHARERS : 1, B_BLOCKS = SHARE_A ? 1 : SHARERS;
constexpr int A_ROWS = BM / A_BLOCKS, B_COLUMNS = BN / B_BLOCKS;  // of the share that a block loads
constexpr unsigned short SHARING_BLOCKS = (1 << SHARERS) - 1;
constexpr int BOX_COLUMNS = 128 / sizeof(T);  // of one box that the copy engine stores
constexpr int BOX_BYTES = 64 * 128;   // 64 rows of them
constexpr int BUFFER_BYTES = K_PARTS > 1 ? 0 : 2 * BOX_BYTES;  // of a group
// Boxes of c in the buffer of a group, and how often it fills its buffer for 64 rows of a tile.
constexpr int BOXES = EPILOGUE != GELU_PRE && BN % (2 * BOX_COLUMNS) == 0 ? 2 : 1;
constexpr int PARTS = BN / (BOXES * BOX_COLUMNS);
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + CONSUMERS * BUFFER_BYTES;
// Barriers of the groups: one may multiply; its buffer has the residual.
constexpr int TURNS_AT = BARRIERS_AT + Pipeline<STAGES>::BYTES, RESIDUALS_AT = TURNS_AT + CONSUMERS * 8;
// 64,512 of 65,536 with two groups that multiply, and with three.
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240;
static_assert(BN % 64 == 0 && RESIDUALS_AT + CONSUMERS * 8 <= 227 << 10, "too much shared memory");
static_assert(!PINGPONG || CONSUMERS == 2, "two groups alternate");
static_assert(!ANY_C || (sizeof(T) == 2 && EPILOGUE <= RESIDUAL), "rows that begin anywhere");
static_assert(sizeof(T) == 2 || (EPILOGUE == PLAIN && !A_MN && !B_MN), "not for float32");
static_assert(!(SPLIT || K_PARTS > 1) || EPILOGUE <= RESIDUAL || EPILOGUE == ROW_SCALE,
              "not for a divided K");
static_assert(K_PARTS == 1 || (CLUSTER % K_PARTS == 0 && !PINGPONG && !SPLIT), "one way to divide K");
static_assert(SHARERS == 1 || (SHARE_A ? A_ROWS : B_COLUMNS) % 64 == 0, "shares are whole blocks of 64");

}  // namespace

struct alignas(64) MatmulArguments {
  TensorMap a, b, c;
  TensorMap extra;  // the residual, or the output for the pre-activation
  // k_steps: of 128 bytes, at least 1. row_tiles, column_tiles: of the blocks of a cluster together.
  int row_tiles, column_tiles, k_steps;
  // With SPLIT: tiles from `whole_tiles` on are sums of `splits` parts of K, at most k_steps, in `partials`:
  // for each unit and 64 rows BN / 8 vectors of 4 of a thread's sums, one thread beside the other.
  int splits;
  float* partials;  // or what an epilogue stores: column sums, sums of rows, lower bytes of sums
  int rows, columns;
  const WEFT_T* bias;  // aligned to 4 bytes
  // With ANY_C: c, and GELU_PRE's second output, (rows, columns). With K_PARTS > 1 also the residual.
  WEFT_T *c_elements, *extra_elements;
  const float* row_values;  // (rows,), of EXPONENTIAL and ROW_SCALE
  // With EXPONENTIAL, may be null. If `farthest` is 0, the kernel ends at once where this number is 0.
  // Otherwise the number becomes 1 if a sum is further than that above its row's number.
  int* condition;
  int phase;                // ADDS and ROUNDS, with ACCUMULATE
  float farthest;
  int whole_tiles;
  long long extra_pitch;  // of the residual, even; with K_PARTS > 1
};
enum { ADDS = 1, ROUNDS = 2 };

struct MatmulSumArguments {
  const float* partials;
  WEFT_T *c, *extra;  // (rows, columns); the residual, or the output for the pre-activation
  const WEFT_T* bias;
  const float* row_values;  // (rows,), with ROW_SCALE
  long long extra_pitch;    // of the residual, even
  int row_tiles, column_tiles, whole_tiles, splits, rows, columns;
};

namespace {

// A tile of c that this block computes, from steps `first` to `end` of K. `partial` is the place of its sums
// if that is a part of K, else -1.
struct Unit { int row, column, first, end, partial; };

// The numbers of this block's part of K, and of this block among those of its cluster that share a or b.
__device__ __forceinline__ int part_of_block() { return K_PARTS > 1 ? cluster_rank() / SHARERS : 0; }
__device__ __forceinline__ int sharer() { return K_PARTS > 1 ? cluster_rank() % SHARERS : cluster_rank(); }

// The first row and column of a block's tile, of those of its cluster.
__device__ __forceinline__ int row_of(const Tile& tile, int rank) {
  return (tile.row * B_BLOCKS + (SHARE_A ? 0 : rank)) * BM;
}
__device__ __forceinline__ int column_of(const Tile& tile, int rank) {
  return (tile.column * A_BLOCKS + (SHARE_A ? rank : 0)) * BN;
}

// Calls `body` with each unit of this block. Blocks that run at the same time have the same part of K.
template <typename Body>
__device__ __forceinline__ void for_each_unit(const MatmulArguments& arguments, Body body) {
  const int rank = SHARERS > 1 ? sharer() : 0;
  const int tiles = arguments.row_tiles * arguments.column_tiles, k_steps = arguments.k_steps;
  const int whole = SPLIT ? arguments.whole_tiles : tiles, splits = SPLIT ? arguments.splits : 1;
  for (int index = blockIdx.x / CLUSTER; index < whole + (tiles - whole) * splits;
       index += gridDim.x / CLUSTER) {
    const bool is_part = SPLIT && index >= whole;
    const int split = is_part ? (index - whole) / (tiles - whole) : 0;
    const Tile tile =
        tile_at<BAND>(index - split * (tiles - whole), arguments.row_tiles, arguments.column_tiles);
    Unit unit{row_of(tile, rank), column_of(tile, rank), 0, k_steps, -1};
    if (is_part) {
      unit.first = (int)((long long)k_steps * split / splits);
      unit.end = (int)((long long)k_steps * (split + 1) / splits);
      unit.partial = (index - whole) * CLUSTER + rank;
    }
    if constexpr (K_PARTS > 1) {
      unit.first = (int)((long long)k_steps * part_of_block() / K_PARTS);
      unit.end = (int)((long long)k_steps * (part_of_block() + 1) / K_PARTS);
    }
    body(unit);
  }
}

// Loads a box into this block's shared memory, or that of all BLOCKS blocks that share it.
template <int BLOCKS>
__device__ __forceinline__ void load(unsigned to, const TensorMap* map, int x, int y, unsigned full) {
  if constexpr (BLOCKS == 1) tma_load(to, map, x, y, full);
  else tma_load_multicast(to, map, x, y, full, SHARING_BLOCKS << part_of_block() * SHARERS);
}

// Loads a tile of BK of K from `step` on by `LENGTH` rows of a (columns of b) from `first` on.
template <int MAJOR, int LENGTH, int BLOCKS>
__device__ __forceinline__ void load_tile(unsigned to, const TensorMap* map, int step, int first,
                                          unsigned full) {
  if constexpr (MAJOR == K_MAJOR) {
    load<BLOCKS>(to, map, step * BK, first, full);
  } else {
#pragma unroll
    for (int block = 0; block < LENGTH / 64; ++block)
      load<BLOCKS>(to + block * BLOCK_BYTES, map, first + block * 64, step * BK, full);
  }
}

__device__ __forceinline__ void produce(const MatmulArguments& arguments, Pipeline<STAGES> pipeline,
                                        unsigned stages) {
  RingPosition<STAGES> ring;
  const int rank = SHARERS > 1 ? sharer() : 0;
  const int a_first = SHARE_A ? rank * A_ROWS : 0, b_first = SHARE_A ? 0 : rank * B_COLUMNS;
  for_each_unit(arguments, [&](const Unit& unit) {
    for (int step = unit.first; step < unit.end; ++step, ring.next()) {
      const unsigned a_at = stages + ring.stage * STAGE_BYTES + a_first * 128;
      const unsigned b_at = stages + ring.stage * STAGE_BYTES + A_BYTES + b_first * 128;
      const unsigned full = pipeline.full(ring.stage);
      pipeline.begin_fill(ring, STAGE_BYTES);  // all blocks' shares arrive here
      load_tile<A_MN, A_ROWS, A_BLOCKS>(a_at, &arguments.a, step, unit.row + a_first, full);
      load_tile<B_MN, B_COLUMNS, B_BLOCKS>(b_at, &arguments.b, step, unit.column + b_first, full);
    }
  });
}

// Frees a stage, in a warp all of whose products have read it. A block with a part of K has one tile: it
// frees only stages that are filled again, so that no arrival comes at a block that may have ended.
__device__ __forceinline__ void release(Pipeline<STAGES> pipeline, int stage, bool is_filled_again) {
  if (threadIdx.x % 32 != 0 || (K_PARTS > 1 && !is_filled_again)) return;
  pipeline.release_in_cluster<SHARERS>(stage, part_of_block() * SHARERS);
}

// Writes the products of `k_steps` steps of one tile to `sums`, and leaves the ring behind its last stage.
__device__ __forceinline__ void multiply(float (&sums)[ROW_BLOCKS][BN / 2], int group, int k_steps,
                                         Pipeline<STAGES> pipeline, RingPosition<STAGES>& ring,
                                         unsigned stages) {
  if (K_PARTS > 1 && k_steps == 0) {  // an empty part of K
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sums[0][i] = 0.0f;
    return;
  }
  int previous = -1;
  for (int step = 0; step < k_steps; ++step) {
    const unsigned a_at = stages + ring.stage * STAGE_BYTES + (PINGPONG ? 0 : group * BLOCK_BYTES);
    const unsigned b_at = stages + ring.stage * STAGE_BYTES + A_BYTES;
    pipeline.wait_full(ring);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 32 bytes of K each
#pragma unroll
      for (int block = 0; block < ROW_BLOCKS; ++block)
        Wgmma<T, A_MN, B_MN, BN>::run(
            sums[block], descriptor<A_MN>(a_at + block * BLOCK_BYTES + k * K_STEP_BYTES<A_MN>),
            descriptor<B_MN>(b_at + k * K_STEP_BYTES<B_MN>), step > 0 || k > 0);
    }
    wgmma_commit();
    // The products of this step run on; those of the step before have read their stage.
    wgmma_wait<1>();
    if (previous >= 0) release(pipeline, previous, step - 1 + STAGES < k_steps);
    previous = ring.stage;
    ring.next();
  }
  // The last products are queued, and all stages of this tile have been full: the other group's may follow.
  if (PINGPONG && threadIdx.x % 32 == 0) mbarrier_arrive(stages + TURNS_AT + (group ^ 1) * 8);
  wgmma_wait<0>();
  release(pipeline, previous, false);
}

}  // namespace

#include "output.cuh"
#if K_PARTS > 1
#include "cluster_sum.cuh"
#endif

extern "C" __global__ void CLUSTER_DIMENSIONS(CLUSTER) __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_wgmma(const __grid_constant__ MatmulArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  // The next kernel starts as soon as these blocks have ended: it waits for their writes by itself.
  launch_dependents();
  const unsigned stages = shared_address(memory);
  const Pipeline<STAGES> pipeline{stages + BARRIERS_AT};
  if (threadIdx.x == 0) {
    tma_prefetch(&arguments.a);  // arguments: no need to wait for the kernel before this one
    tma_prefetch(&arguments.b);
    for (int group = 0; group < CONSUMERS && K_PARTS == 1; ++group) {
      mbarrier_init(stages + TURNS_AT + group * 8, 4);
      mbarrier_init(stages + RESIDUALS_AT + group * 8, 1);
    }
#if K_PARTS > 1
    ClusterSum::init(stages);
#endif
    pipeline.init((PINGPONG ? 1 : CONSUMERS) * 4 * SHARERS);
  }
  if constexpr (CLUSTER > 1) cluster_barrier();  // another block's copies count on this block's barriers
  else __syncthreads();
  wait_for_previous_kernel();
  if constexpr (EPILOGUE == EXPONENTIAL)
    if (arguments.condition != nullptr && arguments.farthest == 0.0f && *arguments.condition == 0) return;
  const int role = group_index();
  if (role == 0) {
    if constexpr (BLOCKS_PER_SM == 1) registers_decrease<PRODUCER_REGISTERS>();
    if (is_issuer()) produce(arguments, pipeline, stages);
  } else {
    if constexpr (BLOCKS_PER_SM == 1) registers_increase<CONSUMER_REGISTERS>();
    const int group = role - 1;
    Output output{arguments, group, stages + STAGES * STAGE_BYTES + group * BUFFER_BYTES,
                  stages + RESIDUALS_AT + group * 8};
    RingPosition<STAGES> ring;
    int index = 0;
    for_each_unit(arguments, [&](const Unit& unit) {
      const int turn = index++;
      if (PINGPONG && turn % CONSUMERS != group) return ring.skip(unit.end - unit.first);
      const int row = unit.row + (PINGPONG ? 0 : group * 64);
      if constexpr (LOADS_EXTRA && K_PARTS == 1)
        if (output.needs_extra() && unit.partial < 0) output.load_residual(row, unit.column);
      // The first turn is group 0's: a fresh barrier lets the opposite parity pass. Without turns a group
      // could take a stage's fill for one that comes two rounds of the ring later.
      if constexpr (PINGPONG)
        wait(stages + TURNS_AT + group * 8, (turn / CONSUMERS & 1) ^ (group == 0 ? 1 : 0));
      float sums[ROW_BLOCKS][BN / 2];
      multiply(sums, group, unit.end - unit.first, pipeline, ring, stages);
#if K_PARTS > 1
      ClusterSum{arguments, group, stages}.store(sums[0], row, unit.column);
      return;
#endif
      if (SPLIT && unit.partial >= 0) {
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; ++block)
          store_partial(sums[block], arguments, unit, PINGPONG ? block : group);
      } else {
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; ++block) {
          if (LOADS_EXTRA && block > 0 && output.needs_extra())
            output.load_residual(row + block * 64, unit.column);
          if constexpr (EPILOGUE == EXPONENTIAL)
            output.exponentiate(sums[block], row + block * 64, unit.column);
          if constexpr (EPILOGUE == ROW_SCALE) output.scale_rows(sums[block], row + block * 64);
          output.store(sums[block], row + block * 64, unit.column);
        }
      }
    });
    // This block's shared memory is given away when its stores have read it.
    if (output.is_issuer()) tma_wait_read<0>();
  }
  // Until the others arrive no more at this block's barriers.
  if constexpr (CLUSTER > 1 && K_PARTS == 1) cluster_barrier();
}

#if SPLIT
// Adds the parts of the divided tiles in the order of K, and stores the epilogue's results: 64 x 32 of c a
// block, from the registers' places in the tile.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    matmul_wgmma_sum(const MatmulSumArguments arguments) {
  launch_dependents();
  wait_for_previous_kernel();
  constexpr int PIECES = BN / 32, PIECE_VECTORS = VECTORS / PIECES;
  const int piece = blockIdx.x % PIECES, rows_of_tile = blockIdx.x / PIECES % CONSUMERS;
  const int rank = blockIdx.x / (PIECES * CONSUMERS) % CLUSTER, thread = threadIdx.x;
  const int number = blockIdx.x / (PIECES * CONSUMERS * CLUSTER);
  const int divided = arguments.row_tiles * arguments.column_tiles - arguments.whole_tiles;
  const Tile tile =
      tile_at<BAND>(arguments.whole_tiles + number, arguments.row_tiles, arguments.column_tiles);
  const int row = row_of(tile, rank) + rows_of_tile * 64 + accumulator_row(thread, 0);
  if (row >= arguments.rows) return;
  float sums[PIECE_VECTORS * 4] = {};
#pragma unroll 4
  for (int split = 0; split < arguments.splits; ++split) {
    const int partial = (split * divided + number) * CLUSTER + rank;
    const float* from = partial_at(arguments.partials, partial, rows_of_tile, thread) +
                        piece * PIECE_VECTORS * GROUP_THREADS * 4;
#pragma unroll
    for (int vector = 0; vector < PIECE_VECTORS; ++vector) {
      const Vector<float, 4> part =
          *reinterpret_cast<const Vector<float, 4>*>(from + vector * GROUP_THREADS * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[vector * 4 + i] += part.at[i];
    }
  }
#pragma unroll
  for (int i = 0; i < PIECE_VECTORS * 4; i += 2) {
    const int column = column_of(tile, rank) + accumulator_column(thread, piece * PIECE_VECTORS * 4 + i);
    const int of_row = row + (i & 2) * 4;
    if (of_row >= arguments.rows || column >= arguments.columns) continue;
    float two[2] = {sums[i], sums[i + 1]};
    store_sums(arguments, two, of_row, column);
  }
}
#endif
