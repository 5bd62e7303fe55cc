// c = epilogue(a b) for at most 64 rows of a, with the bits of wgmma.cu (wgmma, sm_90a): float16, bfloat16;
// both operands K-major.
//
// Each element is the same chain of products over all of K as in wgmma.cu, so that its bits do not depend on
// the number of rows. K is not divided; instead tiles have few columns, so that about as many tiles as SMs
// read the weight b at the same time. One thread of group 0 copies boxes of a and b into a ring of stages,
// deep enough that the bytes in flight hide the latency of memory; group 1 multiplies 64 rows by BN columns,
// and stores from registers.
// A box of a has A_ROWS rows. The other rows of its 64 hold whatever the memory held before: rows of a
// product do not depend on each other, and these are not stored. The blocks of a cluster share a: each loads
// its part of the rows for all.
#define OVERLAP 1
#include "hopper/barrier.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "hopper/wgmma_narrow_shapes.cuh"
#include "hopper/wgmma_pixel_shapes.cuh"
#include "epilogue.cuh"
#include "overlap.cuh"

#ifndef BN
#define BN 32
#define A_ROWS 64
#define K_BLOCKS 2
#define STAGES 8
#define CLUSTER 1
#endif

using namespace hopper;

namespace {

constexpr int BK = 64;  // elements of K in a block, 128 bytes
constexpr int B_BYTES = BN * 128, BLOCK_OF_K_BYTES = BLOCK_BYTES + B_BYTES;  // a's 64 rows, then b's columns
constexpr int STAGE_BYTES = K_BLOCKS * BLOCK_OF_K_BYTES;
constexpr int LOADED_BYTES = K_BLOCKS * (A_ROWS * 128 + B_BYTES);  // of a stage, by all blocks of the cluster
constexpr int SHARE_ROWS = A_ROWS / CLUSTER;  // of a, that a block loads
constexpr unsigned short ALL_BLOCKS = (1 << CLUSTER) - 1;
constexpr int THREADS = 2 * GROUP_THREADS;
static_assert(SHARE_ROWS % 8 == 0, "a box begins at an atom of the swizzle");
static_assert(BN % 8 == 0 && STAGES * STAGE_BYTES + Pipeline<STAGES>::BYTES <= 227 << 10,
              "too much shared memory");
static_assert(EPILOGUE <= RESIDUAL, "epilogues without sums over rows or columns");

}  // namespace

struct alignas(64) FewRowsArguments {
  TensorMap a, b;
  int steps;         // of K_BLOCKS blocks of K
  int column_tiles;  // of the blocks of a cluster together
  int rows, columns;  // columns: a multiple of 8
  WEFT_T *c, *pre;    // (rows, columns); pre: with GELU_PRE
  const WEFT_T *bias, *residual;  // (columns,), (rows, columns)
};

namespace {

__device__ __forceinline__ void produce(const FewRowsArguments& arguments, Pipeline<STAGES> pipeline,
                                        unsigned stages, int rank) {
  RingPosition<STAGES> ring;
  for (int tile = blockIdx.x / CLUSTER; tile < arguments.column_tiles; tile += gridDim.x / CLUSTER) {
    const int column = (tile * CLUSTER + rank) * BN;
    for (int step = 0; step < arguments.steps; ++step, ring.next()) {
      const unsigned full = pipeline.full(ring.stage);
      pipeline.begin_fill(ring, LOADED_BYTES);  // all blocks' shares of a arrive here
#pragma unroll
      for (int block = 0; block < K_BLOCKS; ++block) {
        const unsigned a_at = stages + ring.stage * STAGE_BYTES + block * BLOCK_OF_K_BYTES;
        const int k = (step * K_BLOCKS + block) * BK;
        tma_load(a_at + BLOCK_BYTES, &arguments.b, k, column, full);
        if constexpr (CLUSTER == 1)
          tma_load(a_at, &arguments.a, k, 0, full);
        else
          tma_load_multicast(a_at + rank * SHARE_ROWS * 128, &arguments.a, k, rank * SHARE_ROWS, full,
                             ALL_BLOCKS);
      }
    }
  }
}

// Writes the products of one tile to `sums`. The order of the products is that of wgmma.cu.
__device__ __forceinline__ void multiply(float (&sums)[BN / 2], int steps, Pipeline<STAGES> pipeline,
                                         RingPosition<STAGES>& ring, unsigned stages) {
  int previous = -1;
  for (int step = 0; step < steps; ++step) {
    pipeline.wait_full(ring);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K_BLOCKS * 4; ++k) {  // 16 of K each
      const unsigned a_at =
          stages + ring.stage * STAGE_BYTES + k / 4 * BLOCK_OF_K_BYTES + k % 4 * K_STEP_BYTES<K_MAJOR>;
      Wgmma<T, K_MAJOR, K_MAJOR, BN>::run(sums, descriptor<K_MAJOR>(a_at),
                                          descriptor<K_MAJOR>(a_at + BLOCK_BYTES), step > 0 || k > 0);
    }
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

// Stores the rows and columns of a tile that are inside of c: two adjacent columns in one access.
__device__ __forceinline__ void store(const float (&sums)[BN / 2], const FewRowsArguments& arguments,
                                      int first) {
  const int thread = threadIdx.x % GROUP_THREADS;
#pragma unroll
  for (int i = 0; i < BN / 2; i += 2) {
    const int row = accumulator_row(thread, i), column = first + accumulator_column(thread, i);
    if (row >= arguments.rows || column >= arguments.columns) continue;
    const long long at = (long long)row * arguments.columns + column;
    float two[2] = {sums[i], sums[i + 1]};
    if constexpr (HAS_BIAS) add(two, *reinterpret_cast<const Vector<T, 2>*>(arguments.bias + column));
    if constexpr (EPILOGUE == RESIDUAL)
      add(two, *reinterpret_cast<const Vector<T, 2>*>(arguments.residual + at));
    if constexpr (EPILOGUE == GELU_PRE) *reinterpret_cast<unsigned*>(arguments.pre + at) = rounded(two);
    if constexpr (EPILOGUE == GELU || EPILOGUE == GELU_PRE) activate(two);
    *reinterpret_cast<unsigned*>(arguments.c + at) = rounded(two);
  }
}

}  // namespace

extern "C" __global__ void CLUSTER_DIMENSIONS(CLUSTER) __launch_bounds__(THREADS, 1)
    few_rows_wgmma(const __grid_constant__ FewRowsArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  // The next kernel may begin as soon as these blocks run; it waits for their end before it reads.
  launch_dependents();
  const unsigned stages = shared_address(memory);
  const Pipeline<STAGES> pipeline{stages + STAGES * STAGE_BYTES};
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    tma_prefetch(&arguments.a);
    tma_prefetch(&arguments.b);
    pipeline.init(4 * CLUSTER);
  }
  if constexpr (CLUSTER > 1) cluster_barrier();  // another block's copies count on this block's barriers
  else __syncthreads();
  wait_for_previous_kernel();
  if (group_index() == 0) {
    if (is_issuer()) produce(arguments, pipeline, stages, rank);
  } else {
    RingPosition<STAGES> ring;
    for (int tile = blockIdx.x / CLUSTER; tile < arguments.column_tiles; tile += gridDim.x / CLUSTER) {
      float sums[BN / 2];
      multiply(sums, arguments.steps, pipeline, ring, stages);
      store(sums, arguments, (tile * CLUSTER + rank) * BN);
    }
  }
  // Until the others arrive no more at this block's barriers.
  if constexpr (CLUSTER > 1) cluster_barrier();
}
