// c = (scale_a a) (scale_b b) by Hopper's tensor cores (wgmma, sm_90a): fp8 factors, c in 16 bits.
//
// Persistent blocks, as in products/wgmma.cu. One thread of warp group 0 copies tiles of a and b by the copy
// engine into a ring of STAGES stages; each of GROUPS other warp groups computes HALVES times 64 x BN of c,
// and stores it through a buffer of its own. Both factors are K-major. K is taken 128 at a time, a row of 128
// bytes; the copy engine fills what lies outside of a and b with zeros, and writes nothing outside of c.
//
// The tensor cores keep about 14 bits of a sum of fp8 products. So each step of 128 begins a new sum there,
// which ordinary instructions then add to a second set of float32 registers (promotion). While one group does
// so, the tensor cores work for the others. With BLOCK_SCALES that addition also multiplies by the scales of
// the step's blocks; without, scales are per row and column (or tensor), and the epilogue multiplies by them.
// SETS is the number of sets of sums in the tensor cores. With 2, a group issues the products of the next
// step before it adds up the sums of this one, and feeds the tensor cores without the other group.
// Tiles of more than 128 rows, by three groups or by two halves a group, load b less often. They are STAGED:
// scales of blocks come through the ring, too (scaled_matmul_staged.cuh). The blocks of a cluster compute
// tiles below each other, which share b, or with SHARE_A beside each other, which share a.
// With SPLIT, K of the last tiles, which are fewer than SMs, is divided into equal parts that different
// blocks take: each writes its sums in float32, and a second kernel adds them in the order of K.
// Source of the design: NVIDIA's CUTLASS, and the promotion of DeepSeek-V3 (arXiv:2412.19437).
#define OVERLAP 1
#include "hopper/barrier.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "hopper/wgmma_fp8_shapes.cuh"
#include "numeric.cuh"
#include "overlap.cuh"

#ifndef BN
#define A_TYPE e4m3
#define B_TYPE e4m3
#define BN 128
#define STAGES 6
#define CLUSTER 1
#define SHARE_A 0
#define SETS 1
#define BLOCK_SCALES 0
#define GROUPS 2
#define HALVES 1
#define SPLIT 0
#endif
#define STAGED (GROUPS * HALVES > 2)

using namespace hopper;

namespace {

using T = WEFT_T;  // of c
constexpr int CONSUMERS = GROUPS, BM = 64 * HALVES * CONSUMERS, BK = 128, BAND = 8;
constexpr int THREADS = GROUP_THREADS * (1 + CONSUMERS);
constexpr int A_BYTES = BM * BK, B_BYTES = BN * BK, STAGE_BYTES = A_BYTES + B_BYTES;
// Each block of a cluster loads a share of the tile that all have in common, for all of them.
constexpr int CLUSTER_ROWS = SHARE_A ? 1 : CLUSTER, CLUSTER_COLUMNS = SHARE_A ? CLUSTER : 1;
constexpr int SHARE_COLUMNS = BN / CLUSTER_ROWS, B_SHARE = SHARE_COLUMNS * BK;
constexpr int SHARE_ROWS = BM / CLUSTER_COLUMNS, A_SHARE = SHARE_ROWS * BK;
constexpr unsigned short ALL_BLOCKS = (1 << CLUSTER) - 1;
constexpr int OUT_COLUMNS = 64;                        // of one box that the copy engine stores: 128 bytes
constexpr int OUT_BYTES = 64 * 128;                    // 64 rows of them
constexpr int BOXES = BN / OUT_COLUMNS;                // times that a group fills its buffer for a tile
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + CONSUMERS * OUT_BYTES;
// Of a thread. A block's threads hold 64,512 registers from its launch on (65,536 for four groups), and a
// request for more never returns.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 56 : STAGED && BLOCK_SCALES ? 72 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 152 : STAGED && BLOCK_SCALES ? 216 : 232;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (CONSUMERS == 3 ? 512 : 504));
constexpr int SCALE_BLOCK = 128, SECTIONS = BN / 64;  // a section of 64 columns has one scale of b
// Warps that write scales, rows of each, and steps whose scales a warp loads at a time.
constexpr int SCALE_WARPS = STAGED && BLOCK_SCALES ? 2 : 0, SCALE_ROWS = BM / 2, SCALE_STEPS = 4;
constexpr int SCALES_AT = BARRIERS_AT + Pipeline<STAGES>::BYTES, SCALES_BYTES = SCALE_WARPS ? BM * 4 : 0;
static_assert(BN % 64 == 0 && SCALES_AT + STAGES * SCALES_BYTES <= 227 << 10, "too much shared memory");
static_assert(SCALE_WARPS == 0 || BN == SCALE_BLOCK, "a tile has one scale of b");
static_assert(!STAGED || SETS == 1, "two sets for more rows do not fit in the registers");

}  // namespace

// Numbers of a scale: `rows` and `columns` are strides in elements; both 0 for one number a tensor. Without
// BLOCK_SCALES a's scale has one row for each row of a, and b's one column for each column of b.
struct Scale {
  const float* numbers;
  long long rows, columns;
};

struct alignas(64) ScaledArguments {
  TensorMap a, b, c;
  Scale scale_a, scale_b;
  // k_steps: of 128, at least 1. row_tiles: of BM rows for each block of a cluster.
  int row_tiles, column_tiles, k_steps;
  // With SPLIT: tiles from `whole_tiles` on are sums of `splits` parts of K, at most k_steps, in `partials`:
  // for each unit and group of warps BN / 8 vectors of 4 of its threads' sums, one thread beside the other.
  int splits;
  float* partials;
  int rows, columns, whole_tiles;
};

struct ScaledSumArguments {
  const float* partials;
  WEFT_T* c;
  Scale scale_a, scale_b;
  int row_tiles, column_tiles, whole_tiles, splits, rows, columns;
};

namespace {

__device__ __forceinline__ float scale_at(const Scale& scale, int row, int column) {
  return scale.numbers[row * scale.rows + column * scale.columns];
}

// A tile of c that this block computes, from steps `first` to `end` of K. `partial` is the place of its sums
// if that is a part of K, else -1.
struct Unit { int row, column, first, end, partial; };

// First row and column of the tile that block `rank` of a cluster computes.
__device__ __forceinline__ int first_row(const Tile& tile, int rank) {
  return (tile.row * CLUSTER_ROWS + (SHARE_A ? 0 : rank)) * BM;
}
__device__ __forceinline__ int first_column(const Tile& tile, int rank) {
  return (tile.column * CLUSTER_COLUMNS + (SHARE_A ? rank : 0)) * BN;
}

// Calls `body` with each unit of this block. Blocks that run at the same time have the same part of K.
template <typename Body>
__device__ __forceinline__ void for_each_unit(const ScaledArguments& arguments, Body body) {
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int tiles = arguments.row_tiles * arguments.column_tiles, k_steps = arguments.k_steps;
  const int whole = SPLIT ? arguments.whole_tiles : tiles, splits = SPLIT ? arguments.splits : 1;
  for (int index = blockIdx.x / CLUSTER; index < whole + (tiles - whole) * splits;
       index += gridDim.x / CLUSTER) {
    const bool is_part = SPLIT && index >= whole;
    const int split = is_part ? (index - whole) / (tiles - whole) : 0;
    const Tile tile =
        tile_at<BAND>(index - split * (tiles - whole), arguments.row_tiles, arguments.column_tiles);
    Unit unit{first_row(tile, rank), first_column(tile, rank), 0, k_steps, -1};
    if (is_part) {
      unit.first = (int)((long long)k_steps * split / splits);
      unit.end = (int)((long long)k_steps * (split + 1) / splits);
      unit.partial = (index - whole) * CLUSTER + rank;
    }
    body(unit);
  }
}

__device__ __forceinline__ void produce(const ScaledArguments& arguments, Pipeline<STAGES> pipeline,
                                        unsigned stages) {
  RingPosition<STAGES> ring;
  tma_prefetch(&arguments.a);
  tma_prefetch(&arguments.b);
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int a_share = SHARE_A ? rank : 0, b_share = SHARE_A ? 0 : rank;
  for_each_unit(arguments, [&](const Unit& unit) {
    for (int step = unit.first; step < unit.end; ++step, ring.next()) {
      const unsigned stage = stages + ring.stage * STAGE_BYTES, full = pipeline.full(ring.stage);
      const unsigned a_at = stage + a_share * A_SHARE, b_at = stage + A_BYTES + b_share * B_SHARE;
      const int row = unit.row + a_share * SHARE_ROWS, column = unit.column + b_share * SHARE_COLUMNS;
      pipeline.begin_fill(ring, STAGE_BYTES);  // all shares of a and b arrive here
      if constexpr (SHARE_A) tma_load_multicast(a_at, &arguments.a, step * BK, row, full, ALL_BLOCKS);
      else tma_load(a_at, &arguments.a, step * BK, row, full);
      if constexpr (CLUSTER_ROWS > 1)
        tma_load_multicast(b_at, &arguments.b, step * BK, column, full, ALL_BLOCKS);
      else tma_load(b_at, &arguments.b, step * BK, column, full);
    }
  });
}

constexpr int OUT_BARRIER = 1;  // of group 0; the next is group 1's

}  // namespace

#if STAGED
#include "scaled_matmul_staged.cuh"
#endif

namespace {

// Issues the products of one step with this group's 64 rows of a.
__device__ __forceinline__ void issue_step(float (&sums)[BN / 2], unsigned stage, int group) {
  const unsigned a_at = stage + group * 64 * BK, b_at = stage + A_BYTES;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BK / 32; ++k)
    WgmmaFp8<A_TYPE, B_TYPE, BN>::run(sums, descriptor<K_MAJOR>(a_at + k * K_STEP_BYTES<K_MAJOR>),
                                      descriptor<K_MAJOR>(b_at + k * K_STEP_BYTES<K_MAJOR>),
                                      k > 0);
  wgmma_commit();
}

// Scales of blocks as a thread needs them: of its two rows of a (8 apart), and of each section of 64 columns
// of b, one step of K after the other. Rows and columns outside of a and b get the last one's: their products
// are never stored.
struct StepScales {
  const float *a_at[2], *b_at[SECTIONS];
  float a[2], b[SECTIONS];

  __device__ __forceinline__ StepScales(const ScaledArguments& arguments, const Unit& unit, int row) {
    const Scale &of_a = arguments.scale_a, &of_b = arguments.scale_b;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      a_at[half] = of_a.numbers + min(row + half * 8, arguments.rows - 1) * of_a.rows +
                   unit.first * of_a.columns;
#pragma unroll
    for (int section = 0; section < SECTIONS; ++section)
      b_at[section] = of_b.numbers + unit.first * of_b.rows +
                      min(unit.column + section * 64, arguments.columns - 1) / SCALE_BLOCK * of_b.columns;
  }

  // Loads the scales of the next step; the first call those of the unit's first.
  __device__ __forceinline__ void load(const ScaledArguments& arguments) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[half] = *a_at[half];
      a_at[half] += arguments.scale_a.columns;
    }
#pragma unroll
    for (int section = 0; section < SECTIONS; ++section) {
      b[section] = *b_at[section];
      b_at[section] += arguments.scale_b.rows;
    }
  }
};

// Writes the products of a unit to `total`, step by step. Each step's sum leaves the tensor cores, and is
// added by ordinary instructions.
struct PromotedSum {
  float (&total)[BN / 2];
  const ScaledArguments& arguments;
  const int group;
  const Pipeline<STAGES> pipeline;
  RingPosition<STAGES>& ring;  // of the next step to issue
  const unsigned stages;
  StepScales scales;           // of the next step to add
  int steps_to_load;

  __device__ __forceinline__ void load_scales() {
    if constexpr (BLOCK_SCALES)
      if (steps_to_load-- > 0) scales.load(arguments);
  }

  // Issues the next step's products into `sums`, and returns their stage.
  __device__ __forceinline__ int issue(float (&sums)[BN / 2]) {
    const int stage = ring.stage;
    pipeline.wait_full(ring);
    issue_step(sums, stages + stage * STAGE_BYTES, group);
    ring.next();
    return stage;
  }

  // Waits until at most PENDING younger steps run, and adds the sums of the step in `stage`.
  template <int PENDING> __device__ __forceinline__ void add(const float (&sums)[BN / 2], int stage) {
    float factors[2][SECTIONS];
    if constexpr (BLOCK_SCALES) {
#pragma unroll
      for (int i = 0; i < 2 * SECTIONS; ++i) factors[i % 2][i / 2] = scales.a[i % 2] * scales.b[i / 2];
      load_scales();  // the next step's arrive while the products run
    }
    wgmma_wait<PENDING>();
    if (threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(stage);
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      if constexpr (BLOCK_SCALES) total[i] += factors[i / 2 % 2][i / 32] * sums[i];
      else total[i] += sums[i];
    }
  }
};

__device__ __forceinline__ void multiply_promoted(float (&total)[BN / 2], const ScaledArguments& arguments,
                                                  const Unit& unit, int group, Pipeline<STAGES> pipeline,
                                                  RingPosition<STAGES>& ring, unsigned stages) {
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) total[i] = 0.0f;
  const int row = unit.row + group * 64 + accumulator_row(threadIdx.x % GROUP_THREADS, 0);
  PromotedSum sum{total, arguments, group, pipeline, ring, stages, StepScales(arguments, unit, row),
                  unit.end - unit.first};
  sum.load_scales();
  float first[BN / 2];
  if constexpr (SETS == 1) {
    for (int step = unit.first; step < unit.end; ++step) sum.add<0>(first, sum.issue(first));
  } else {
    float second[BN / 2];
    int first_stage = sum.issue(first), step = unit.first, second_stage;
    // Two steps at a time, so that each set has its registers. One or two steps are left for the end.
    for (; step + 2 < unit.end; step += 2) {
      second_stage = sum.issue(second);
      sum.add<1>(first, first_stage);
      first_stage = sum.issue(first);
      sum.add<1>(second, second_stage);
    }
    if (step + 1 < unit.end) {
      second_stage = sum.issue(second);
      sum.add<1>(first, first_stage);
      sum.add<0>(second, second_stage);
    } else {
      sum.add<0>(first, first_stage);
    }
  }
}

// Multiplies a thread's sums of one box of columns by the scales of their rows and columns.
__device__ __forceinline__ void apply_scales(float (&sums)[BN / 2], const ScaledArguments& arguments,
                                             const Unit& unit, int group, int box) {
  const int thread = threadIdx.x % GROUP_THREADS;
  const int row = unit.row + group * 64 + accumulator_row(thread, 0);
  float of_rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    of_rows[half] = scale_at(arguments.scale_a, min(row + half * 8, arguments.rows - 1), 0);
#pragma unroll
  for (int j = 0; j < OUT_COLUMNS / 2; ++j) {
    const int i = box * OUT_COLUMNS / 2 + j;
    const int column = min(unit.column + accumulator_column(thread, i), arguments.columns - 1);
    sums[i] *= of_rows[i / 2 % 2] * scale_at(arguments.scale_b, 0, column);
  }
}

// Stores the 64 x BN sums of a group as elements of its unit, through its `buffer`.
__device__ __forceinline__ void store(float (&sums)[BN / 2], const ScaledArguments& arguments,
                                      const Unit& unit, int group, unsigned buffer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP_THREADS / 32;
  // Lane l gives the address of row l % 16 of the warp's 16, in column 8 (l / 16) of each 16.
  const int matrix_row = warp * 16 + lane % 16;
#pragma unroll
  for (int box = 0; box < BOXES; ++box) {
    // Box by box, with a barrier between: for all scales at once there are no registers.
    if constexpr (!BLOCK_SCALES) apply_scales(sums, arguments, unit, group, box);
    // The issuing thread's copy has read the buffer; then everyone may overwrite it.
    if (threadIdx.x % GROUP_THREADS == 0) tma_wait_read<0>();
    named_barrier(OUT_BARRIER + group, GROUP_THREADS);
#pragma unroll
    for (int pair = 0; pair < OUT_COLUMNS / 16; ++pair) {
      const int i = (box * OUT_COLUMNS + pair * 16) / 2;  // of the thread's sums
      unsigned words[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const T two[2] = {from_float<T>(sums[i + word * 2]), from_float<T>(sums[i + word * 2 + 1])};
        memcpy(&words[word], two, 4);
      }
      const int chunk = (pair * 2 + lane / 16) ^ (matrix_row & 7);
      store_matrices(buffer + matrix_row * 128 + chunk * 16, words[0], words[1], words[2], words[3]);
    }
    fence_async_proxy();
    named_barrier(OUT_BARRIER + group, GROUP_THREADS);
    if (threadIdx.x % GROUP_THREADS == 0) {
      tma_store(&arguments.c, buffer, unit.column + box * OUT_COLUMNS, unit.row + group * 64);
      tma_commit();
    }
  }
}

constexpr int VECTORS = BN / 8;  // of 4 sums, of a thread

// Address of a thread's first vector of sums; the next is GROUP_THREADS vectors further.
template <typename Partials>
__device__ __forceinline__ auto partial_at(Partials partials, int partial, int group, int thread) {
  const long long vectors = ((long long)partial * CONSUMERS * HALVES + group) * VECTORS;
  return partials + (vectors * GROUP_THREADS + thread) * 4;
}

// Stores the sums of 64 rows in float32, unless these are outside of c. With HALVES, `group` counts halves.
__device__ __forceinline__ void store_partial(const float (&sums)[BN / 2], const ScaledArguments& arguments,
                                              const Unit& unit, int group) {
  const int thread = threadIdx.x % GROUP_THREADS;
  if (unit.row + group * 64 + accumulator_row(thread, 0) >= arguments.rows) return;
  float* const to = partial_at(arguments.partials, unit.partial, group, thread);
#pragma unroll
  for (int vector = 0; vector < VECTORS; ++vector)
    *reinterpret_cast<Vector<float, 4>*>(to + vector * GROUP_THREADS * 4) = {
        sums[vector * 4], sums[vector * 4 + 1], sums[vector * 4 + 2], sums[vector * 4 + 3]};
}

}  // namespace

extern "C" __global__ void CLUSTER_DIMENSIONS(CLUSTER) __launch_bounds__(THREADS, 1)
    scaled_matmul(const __grid_constant__ ScaledArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  if constexpr (SPLIT) launch_dependents();  // the second kernel starts as soon as these blocks have ended
  const unsigned stages = shared_address(memory);
  const Pipeline<STAGES> pipeline{stages + BARRIERS_AT};
  if (threadIdx.x == 0) pipeline.init(CONSUMERS * 4 * CLUSTER, 1 + SCALE_WARPS);
  if constexpr (CLUSTER > 1) cluster_barrier();  // another block's copies count on this block's barriers
  else __syncthreads();
  const int role = group_index();
  if (role == 0) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (is_issuer()) produce(arguments, pipeline, stages);
#if STAGED
    if constexpr (SCALE_WARPS > 0) {
      const int part = __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0) - 1;  // warp 0 is the issuer's
      if (part >= 0 && part < SCALE_WARPS) produce_scales(arguments, pipeline, stages + SCALES_AT, part);
    }
#endif
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    const int group = role - 1;
    const unsigned buffer = stages + STAGES * STAGE_BYTES + group * OUT_BYTES;
    RingPosition<STAGES> ring;
#if STAGED
    for_each_unit(arguments, [&](const Unit& unit) {
      float sums[HALVES][BN / 2];
      multiply_staged(sums, unit, group, pipeline, ring, stages);
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        Unit part = unit;  // whose rows from group * 64 on are this half's
        part.row += (group * (HALVES - 1) + half) * 64;
        if (SPLIT && unit.partial >= 0) store_partial(sums[half], arguments, unit, group * HALVES + half);
        else store(sums[half], arguments, part, group, buffer);
      }
    });
#else
    for_each_unit(arguments, [&](const Unit& unit) {
      float sums[BN / 2];
      multiply_promoted(sums, arguments, unit, group, pipeline, ring, stages);
      if (SPLIT && unit.partial >= 0) store_partial(sums, arguments, unit, group);
      else store(sums, arguments, unit, group, buffer);
    });
#endif
    if (threadIdx.x % GROUP_THREADS == 0) tma_wait<0>();  // before this block's shared memory is given away
  }
  // Until the others arrive no more at this block's barriers.
  if constexpr (CLUSTER > 1) cluster_barrier();
}

#if SPLIT
// Adds the parts of the divided tiles, multiplies by the scales of row and column, and stores 64 x 32 of c a
// block, from the registers' places in the tile.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    scaled_matmul_sum(const ScaledSumArguments arguments) {
  wait_for_previous_kernel();
  constexpr int PIECES = BN / 32, PIECE_VECTORS = VECTORS / PIECES;
  constexpr int TILE_GROUPS = CONSUMERS * HALVES;  // of 64 rows
  const int piece = blockIdx.x % PIECES, group = blockIdx.x / PIECES % TILE_GROUPS;
  const int rank = blockIdx.x / (PIECES * TILE_GROUPS) % CLUSTER;
  const int number = blockIdx.x / (PIECES * TILE_GROUPS * CLUSTER), thread = threadIdx.x;
  const int divided = arguments.row_tiles * arguments.column_tiles - arguments.whole_tiles;
  const Tile tile =
      tile_at<BAND>(arguments.whole_tiles + number, arguments.row_tiles, arguments.column_tiles);
  const int row = first_row(tile, rank) + group * 64 + accumulator_row(thread, 0);
  if (row >= arguments.rows) return;
  float sums[PIECE_VECTORS * 4] = {};
#pragma unroll 4
  for (int split = 0; split < arguments.splits; ++split) {
    const int partial = (split * divided + number) * CLUSTER + rank;
    const float* from = partial_at(arguments.partials, partial, group, thread) +
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
    const int column =
        first_column(tile, rank) + accumulator_column(thread, piece * PIECE_VECTORS * 4 + i);
    const int of_row = row + (i & 2) * 4;
    if (of_row >= arguments.rows || column >= arguments.columns) continue;
    Vector<T, 2> out;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = sums[i + j];
      if constexpr (!BLOCK_SCALES)
        sum *= scale_at(arguments.scale_a, of_row, 0) * scale_at(arguments.scale_b, 0, column + j);
      out.at[j] = from_float<T>(sum);
    }
    *reinterpret_cast<Vector<T, 2>*>(arguments.c + (long long)of_row * arguments.columns + column) = out;
  }
}
#endif
