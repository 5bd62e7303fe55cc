// c = a b by Hopper's tensor cores (wgmma, sm_90a): float16 and bfloat16, sums in float32.
//
// Persistent blocks of three warp groups. One thread of group 0 copies tiles of a and b by the copy engine
// into a ring of STAGES stages; groups 1 and 2 each compute 64 x BN of c from shared memory, and store it
// through a buffer of their own by the copy engine, while the producer already fetches the next tile. K is
// taken 64 at a time; the copy engine fills what lies outside of a and b with zeros, and writes nothing
// outside of c. Each element of c is one sum over K in a fixed order, whatever the size of the product.
// Source of the design: NVIDIA's CUTLASS, "cooperative" kernels for sm_90.
#include "hopper/barrier.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "numeric.cuh"

#ifndef BN
#define BN 256
#define STAGES 4
#define CLUSTER 1
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
};

namespace {

// Calls `body` with the row and column of c where each tile of this block begins.
template <typename Body>
__device__ __forceinline__ void for_each_tile(const MatmulArguments& arguments, Body body) {
  const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int tiles = arguments.row_tiles * arguments.column_tiles;
  for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
    const Tile tile = tile_at<BAND>(index, arguments.row_tiles, arguments.column_tiles);
    body((tile.row * CLUSTER + (int)rank) * BM, tile.column * BN);
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
  for_each_tile(arguments, [&](int row, int column) {
    for (int step = 0; step < arguments.k_steps; ++step, ring.next()) {
      const unsigned a_at = stages + ring.stage * STAGE_BYTES, b_at = a_at + A_BYTES + share * B_SHARE;
      const unsigned full = pipeline.full(ring.stage);
      const int first = column + share * SHARE_COLUMNS;
      pipeline.begin_fill(ring, STAGE_BYTES);  // all shares of b arrive here
      if constexpr (A_MN == K_MAJOR) {
        tma_load(a_at, &arguments.a, step * BK, row, full);
      } else {
#pragma unroll
        for (int block = 0; block < BM / 64; ++block)
          tma_load(a_at + block * BLOCK_BYTES, &arguments.a, row + block * 64, step * BK, full);
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

// Adds the products of one tile to `sums`, and leaves the ring behind its last stage.
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

}  // namespace

extern "C" __global__ void CLUSTER_DIMENSIONS(CLUSTER) __launch_bounds__(THREADS, 1)
    matmul_wgmma(const __grid_constant__ MatmulArguments arguments) {
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
    const unsigned buffer = stages + STAGES * STAGE_BYTES + group * OUT_BOXES * OUT_BYTES;
    RingPosition<STAGES> ring;
    for_each_tile(arguments, [&](int row, int column) {
      float sums[BN / 2];
      multiply(sums, group, arguments.k_steps, pipeline, ring, stages);
      store(sums, &arguments.c, row, column, group, buffer);
    });
    if (threadIdx.x % GROUP_THREADS == 0) tma_wait<0>();  // before this block's shared memory is given away
  }
  // Until the others arrive no more at this block's barriers.
  if constexpr (CLUSTER > 1) cluster_barrier();
}
