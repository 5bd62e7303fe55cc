// c = a b by Hopper's tensor cores (wgmma, sm_90a): float16 and bfloat16, sums in float32.
//
// Persistent blocks of three warp groups. One thread of group 0 copies tiles of a and b by the copy engine
// into a ring of STAGES stages; groups 1 and 2 each compute 64 x BN of c from shared memory, and store it
// through a buffer of their own by the copy engine, while the producer already fetches the next tile. K is
// taken 64 at a time; the copy engine fills what lies outside of a and b with zeros, and writes nothing
// outside of c. Each element of c is one sum over K in a fixed order, whatever the size of the product.
// With SPLIT, K is divided into equal parts that different blocks take, for products with fewer tiles than
// SMs: each writes its sums in float32, and a second kernel adds them in the order of K.
// Source of the design: NVIDIA's CUTLASS, "cooperative" kernels for sm_90.
#define OVERLAP 1
#include "hopper/barrier.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "numeric.cuh"
#include "overlap.cuh"

#ifndef BN
#define BN 256
#define STAGES 4
#define CLUSTER 1
#define SPLIT 0
#define A_MN 0
#define B_MN 1
#endif

using namespace hopper;

namespace {

using T = WEFT_T;
constexpr int CONSUMERS = 2, BM = 64 * CONSUMERS, BK = 64, BAND = 8;
constexpr int THREADS = GROUP_THREADS * (1 + CONSUMERS);
constexpr int A_BYTES = BM * 128, B_BYTES = BN * 128, STAGE_BYTES = A_BYTES + B_BYTES;
// The blocks of a cluster compute tiles below each other. Each loads a share of their common tile of b.
constexpr int B_SHARE = B_BYTES / CLUSTER, SHARE_COLUMNS = BN / CLUSTER;
constexpr unsigned short ALL_BLOCKS = (1 << CLUSTER) - 1;
constexpr int OUT_COLUMNS = 64;                    // of one box that the copy engine stores: 128 bytes
constexpr int OUT_BYTES = 64 * 128;                // 64 rows of them
constexpr int OUT_BOXES = BN % 128 == 0 ? 2 : 1;   // in the buffer of a group
constexpr int PARTS = BN / (OUT_BOXES * OUT_COLUMNS);  // times that a group fills its buffer for a tile
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + CONSUMERS * OUT_BOXES * OUT_BYTES;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // with 384 threads: 64,512 of 65,536
static_assert(BN % 64 == 0 && BARRIERS_AT + Pipeline<STAGES>::BYTES <= 227 << 10, "too much shared memory");

}  // namespace

struct alignas(64) MatmulArguments {
  TensorMap a, b, c;
  // k_steps: of 64, at least 1. row_tiles: of BM rows for each block of a cluster.
  int row_tiles, column_tiles, k_steps;
  // With SPLIT: c (rows, columns) is the sum of `splits` matrices, at most k_steps, in `partials`.
  int splits;
  float* partials;
  int rows, columns;
};

struct MatmulSumArguments {
  const float* partials;
  WEFT_T* c;
  long long vectors, splits;  // of 8 elements of c; matrices
};

namespace {

// A tile of c that this block computes, from steps `first` to `end` of K; `split` numbers these parts of K.
struct Unit { int row, column, first, end, split; };

// Calls `body` with each unit of this block. Blocks that run at the same time have the same part of K.
template <typename Body>
__device__ __forceinline__ void for_each_unit(const MatmulArguments& arguments, Body body) {
  const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int tiles = arguments.row_tiles * arguments.column_tiles, k_steps = arguments.k_steps;
  const int splits = SPLIT ? arguments.splits : 1;
  for (int index = blockIdx.x / CLUSTER; index < tiles * splits; index += gridDim.x / CLUSTER) {
    const int split = SPLIT ? index / tiles : 0;
    const Tile tile = tile_at<BAND>(index - split * tiles, arguments.row_tiles, arguments.column_tiles);
    const int row = (tile.row * CLUSTER + (int)rank) * BM, column = tile.column * BN;
    if constexpr (SPLIT)
      body(Unit{row, column, (int)((long long)k_steps * split / splits),
                (int)((long long)k_steps * (split + 1) / splits), split});
    else body(Unit{row, column, 0, k_steps, 0});
  }
}

__device__ __forceinline__ void load_b(unsigned to, const TensorMap* map, int x, int y, unsigned full) {
  if constexpr (CLUSTER == 1) tma_load(to, map, x, y, full);
  else tma_load_multicast(to, map, x, y, full, ALL_BLOCKS);
}

__device__ __forceinline__ void produce(const MatmulArguments& arguments, Pipeline<STAGES> pipeline,
                                        unsigned stages) {
  RingPosition<STAGES> ring;
  tma_prefetch(&arguments.a);
  tma_prefetch(&arguments.b);
  const int share = CLUSTER > 1 ? cluster_rank() : 0;
  for_each_unit(arguments, [&](const Unit& unit) {
    for (int step = unit.first; step < unit.end; ++step, ring.next()) {
      const unsigned a_at = stages + ring.stage * STAGE_BYTES, b_at = a_at + A_BYTES + share * B_SHARE;
      const unsigned full = pipeline.full(ring.stage);
      const int first = unit.column + share * SHARE_COLUMNS;
      pipeline.begin_fill(ring, STAGE_BYTES);  // all shares of b arrive here
      if constexpr (A_MN == K_MAJOR) {
        tma_load(a_at, &arguments.a, step * BK, unit.row, full);
      } else {
#pragma unroll
        for (int block = 0; block < BM / 64; ++block)
          tma_load(a_at + block * BLOCK_BYTES, &arguments.a, unit.row + block * 64, step * BK, full);
      }
      if constexpr (B_MN == K_MAJOR) {
        load_b(b_at, &arguments.b, step * BK, first, full);
      } else {
#pragma unroll
        for (int block = 0; block < SHARE_COLUMNS / 64; ++block)
          load_b(b_at + block * BLOCK_BYTES, &arguments.b, first + block * 64, step * BK, full);
      }
    }
  });
}

// Writes the products of `k_steps` steps of one tile to `sums`, and leaves the ring behind its last stage.
__device__ __forceinline__ void multiply(float (&sums)[BN / 2], int group, int k_steps,
                                         Pipeline<STAGES> pipeline, RingPosition<STAGES>& ring,
                                         unsigned stages) {
  int previous = -1;
  for (int step = 0; step < k_steps; ++step) {
    const unsigned a_at = stages + ring.stage * STAGE_BYTES + group * 64 * 128;
    const unsigned b_at = stages + ring.stage * STAGE_BYTES + A_BYTES;
    pipeline.wait_full(ring);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / 16; ++k)
      Wgmma<T, A_MN, B_MN, BN>::run(sums, descriptor<A_MN>(a_at + k * K_STEP_BYTES<A_MN>),
                                          descriptor<B_MN>(b_at + k * K_STEP_BYTES<B_MN>),
                                          step > 0 || k > 0);
    wgmma_commit();
    // The products of this step run on; those of the step before have read their stage.
    wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(previous);
    previous = ring.stage;
    ring.next();
  }
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(previous);
}

// Stores the 64 x BN sums of a group as elements of c from (row, column) on, through its `buffer`.
__device__ __forceinline__ void store(const float (&sums)[BN / 2], const TensorMap* map, int row, int column,
                                      int group, unsigned buffer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP_THREADS / 32;
  // Lane l gives the address of row l % 16 of the warp's 16, in column 8 (l / 16) of each 16.
  const int matrix_row = warp * 16 + lane % 16;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    // The issuing thread's copies have read the buffer; then everyone may overwrite it.
    if (threadIdx.x % GROUP_THREADS == 0) tma_wait_read<0>();
    named_barrier(1 + group, GROUP_THREADS);
#pragma unroll
    for (int box = 0; box < OUT_BOXES; ++box) {
#pragma unroll
      for (int pair = 0; pair < OUT_COLUMNS / 16; ++pair) {
        const int i = ((part * OUT_BOXES + box) * OUT_COLUMNS + pair * 16) / 2;  // of the thread's sums
        unsigned words[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const T two[2] = {from_float<T>(sums[i + word * 2]), from_float<T>(sums[i + word * 2 + 1])};
          memcpy(&words[word], two, 4);
        }
        const int chunk = (pair * 2 + lane / 16) ^ (matrix_row & 7);
        store_matrices(buffer + box * OUT_BYTES + matrix_row * 128 + chunk * 16, words[0], words[1], words[2],
                       words[3]);
      }
    }
    fence_async_proxy();
    named_barrier(1 + group, GROUP_THREADS);
    if (threadIdx.x % GROUP_THREADS == 0) {
#pragma unroll
      for (int box = 0; box < OUT_BOXES; ++box)
        tma_store(map, buffer + box * OUT_BYTES, column + (part * OUT_BOXES + box) * OUT_COLUMNS,
                  row + group * 64);
      tma_commit();
    }
  }
}

// Stores the sums of a group as float32: four lanes write 32 bytes of a row. Columns are a multiple of 8.
__device__ __forceinline__ void store_partial(const float (&sums)[BN / 2], const MatmulArguments& arguments,
                                              const Unit& unit, int group) {
  const int thread = threadIdx.x % GROUP_THREADS;
  float* const to = arguments.partials + (long long)unit.split * arguments.rows * arguments.columns;
#pragma unroll
  for (int i = 0; i < BN / 2; i += 2) {
    const int row = unit.row + group * 64 + accumulator_row(thread, i);
    const int column = unit.column + accumulator_column(thread, i);
    if (row < arguments.rows && column < arguments.columns)
      *reinterpret_cast<Vector<float, 2>*>(to + (long long)row * arguments.columns + column) = {sums[i],
                                                                                                sums[i + 1]};
  }
}

}  // namespace

extern "C" __global__ void CLUSTER_DIMENSIONS(CLUSTER) __launch_bounds__(THREADS, 1)
    matmul_wgmma(const __grid_constant__ MatmulArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  if constexpr (SPLIT) launch_dependents();  // the second kernel starts as soon as these blocks have ended
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
    const unsigned buffer = stages + STAGES * STAGE_BYTES + group * OUT_BOXES * OUT_BYTES;
    RingPosition<STAGES> ring;
    for_each_unit(arguments, [&](const Unit& unit) {
      float sums[BN / 2];
      multiply(sums, group, unit.end - unit.first, pipeline, ring, stages);
      if constexpr (SPLIT) store_partial(sums, arguments, unit, group);
      else store(sums, &arguments.c, unit.row, unit.column, group, buffer);
    });
    if (threadIdx.x % GROUP_THREADS == 0) tma_wait<0>();  // before this block's shared memory is given away
  }
  // Until the others arrive no more at this block's barriers.
  if constexpr (CLUSTER > 1) cluster_barrier();
}

#if SPLIT
// c = the sum of the partial products, 8 elements a thread.
extern "C" __global__ void __launch_bounds__(256) matmul_wgmma_sum(const MatmulSumArguments arguments) {
  wait_for_previous_kernel();
  const long long vector = (long long)blockIdx.x * 256 + threadIdx.x;
  if (vector >= arguments.vectors) return;
  const float* from = arguments.partials + vector * 8;
  float sums[8] = {};
#pragma unroll 4
  for (int split = 0; split < arguments.splits; ++split, from += arguments.vectors * 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Vector<float, 4> part = *reinterpret_cast<const Vector<float, 4>*>(from + half * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[half * 4 + i] += part.at[i];
    }
  }
  Vector<T, 8> out;
#pragma unroll
  for (int i = 0; i < 8; ++i) out.at[i] = from_float<T>(sums[i]);
  *reinterpret_cast<Vector<T, 8>*>(arguments.c + vector * 8) = out;
}
#endif
