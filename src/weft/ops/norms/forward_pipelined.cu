// Norms forward of long rows: clusters loop over rows that the bulk copy engine (TMA) brings.
//
// As forward_row_loop.cu, a cluster takes one row after another and reads its weights once. Here the
// rows in flight lie in a pipeline of STAGES slices in shared memory and need no registers, so that
// several rows can be in flight. A slice is read once, into registers. When the sums of all warps of
// the cluster have arrived, every warp has read its part of the slice, and the next row is loaded in
// its place: the pipeline needs no barrier of its own. Weights stay in registers
// (WEIGHTS_IN_REGISTERS) or in shared memory. A block ends only after all data that other blocks
// send to it has arrived.
// x, r: (rows, columns), with row strides; w, b: (columns,); y, s: (rows, columns) contiguous; at
// most 2^30 rows, and no more clusters than rows. Rows are multiples of 16 bytes.
// Bytes: n read + n written; with RESIDUAL 2n + 2n. Shared memory: the stages, then unless
// WEIGHTS_IN_REGISTERS the slices of w and (CENTRED) of b; each slice has room for VECS_PER_THREAD
// vectors a thread.
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#include "hopper.cuh"
#include "forward_row.cuh"

#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef WEIGHTS_IN_REGISTERS
#define WEIGHTS_IN_REGISTERS 0
#endif

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

constexpr int SLICE_VECTORS = THREADS * VECS_PER_THREAD;  // capacity of a slice in shared memory
constexpr int TENSORS = 1 + RESIDUAL;
// One mbarrier for each stage, two for the sums of alternating rows, one for the weights.
constexpr int BARRIERS = STAGES + 3;

// A vector held as 32-bit words. The compiler would otherwise hold 16-bit elements one a register.
template <typename P> struct WordVector {
  uint4 word[sizeof(P) / 16] = {};

  __device__ __forceinline__ void load(const void* from, int at, bool in_slice) {
    if (!NO_TAIL && !in_slice) return;
#pragma unroll
    for (int k = 0; k < (int)(sizeof(P) / 16); ++k)
      word[k] = reinterpret_cast<const uint4*>(from)[at * (sizeof(P) / 16) + k];
  }
  __device__ __forceinline__ P value() {
    P p;
    memcpy(&p, word, sizeof(P));
    return p;
  }
  // As `value`, with floats converted anew from the words (see discard_floats).
  __device__ __forceinline__ P value_discarding_floats() {
#pragma unroll
    for (int k = 0; k < (int)(sizeof(P) / 16); ++k)
      asm volatile("" : "+r"(word[k].x), "+r"(word[k].y), "+r"(word[k].z), "+r"(word[k].w));
    return value();
  }
};

// The block's slices in flight: each stage holds x's slice and then (RESIDUAL) r's.
struct SlicePipeline {
  const WEFT_T *x, *r;
  index_t x_stride, r_stride;
  int rows, bytes;
  unsigned long long* arrived;  // STAGES mbarriers

  __device__ __forceinline__ Pack* stage_slice(int stage) const {
    return reinterpret_cast<Pack*>(memory) + stage * TENSORS * SLICE_VECTORS;
  }
  __device__ __forceinline__ void issue_load(int row, int stage) const {
    if (row >= rows || !bytes) return;
    mbarrier_expect_bytes(arrived + stage, TENSORS * bytes);
    bulk_copy(stage_slice(stage), x + row * x_stride, bytes, arrived + stage);
    if (RESIDUAL)
      bulk_copy(stage_slice(stage) + SLICE_VECTORS, r + row * r_stride, bytes, arrived + stage);
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_PER_SM)
norm_pipelined(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
               const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
               WEFT_T* __restrict__ s, index_t rows, index_t columns, index_t x_stride,
               index_t r_stride, double eps) {
  __shared__ float table[2][ROW_WARPS * NUM_FIELDS];
  __shared__ unsigned long long arrived[BARRIERS];
  unsigned long long *const sums_arrived = arrived + STAGES, *const weights_arrived = sums_arrived + 2;
  const Slice slice(columns / N);
  const index_t from = (index_t)slice.begin * N;
  const int row_step = gridDim.x / CLUSTER, first_row = blockIdx.x / CLUSTER;
  const SlicePipeline pipeline = {x + from,  r + from,       x_stride, r_stride,
                                  (int)rows, slice.count * 16, arrived};
  Weights* const weights = reinterpret_cast<Weights*>(pipeline.stage_slice(STAGES));
  Weights* const biases = weights + (CENTRED ? SLICE_VECTORS : 0);
  if (threadIdx.x == 0) {
    init_mbarriers(arrived, BARRIERS);
    pipeline.issue_load(first_row, 0);
    if (!WEIGHTS_IN_REGISTERS && slice.count) {
      const int bytes = slice.count * sizeof(Weights);
      mbarrier_expect_bytes(weights_arrived, (1 + CENTRED) * bytes);
      bulk_copy(weights, w + from, bytes, weights_arrived);
      if (CENTRED) bulk_copy(biases, b + from, bytes, weights_arrived);
    }
    for (int k = 1; k < STAGES; ++k) pipeline.issue_load(first_row + k * row_step, k);
  }
  __syncthreads();  // the mbarriers are initialised before any thread waits on one
#if CLUSTER > 1
  cluster_arrive_relaxed();
#endif
  WordVector<Weights> weight_words[VECS_PER_THREAD], bias_words[CENTRED ? VECS_PER_THREAD : 1];
#pragma unroll
  for (int i = 0; WEIGHTS_IN_REGISTERS && i < VECS_PER_THREAD; ++i) {
    const int at = threadIdx.x + i * THREADS;
    weight_words[i].load(w + from, at, at < slice.count);
    if (CENTRED) bias_words[CENTRED ? i : 0].load(b + from, at, at < slice.count);
  }
  const WarpCounts<> counts = warp_counts(slice.per_row, slice.per_block);
  const float inverse_columns = __frcp_rn((float)columns);
  int stage = 0;
  unsigned phase = 0, iteration = 0;
  for (int row = first_row; row < pipeline.rows; row += row_step, ++iteration) {
    const int parity = iteration % 2;  // selects the table and its mbarrier
    if (slice.count) mbarrier_wait(arrived + stage, phase);
    WordVector<Pack> in[VECS_PER_THREAD];
    Pack values[VECS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = threadIdx.x + i * THREADS;
      in[i].load(pipeline.stage_slice(stage), at, at < slice.count);
      values[i] = in[i].value();
      if (!RESIDUAL || (!NO_TAIL && at >= slice.count)) continue;
      values[i] = add_residual(values[i], pipeline.stage_slice(stage)[SLICE_VECTORS + at]);
      memcpy(in[i].word, &values[i], sizeof(Pack));
      reinterpret_cast<uint4*>(s + row * columns + from)[at] = in[i].word[0];
    }
    const float ref = warp_reference(values, slice.count);
    const PartialSums sums = thread_sums(values, ref, threadIdx.x, slice.count);
#if CLUSTER > 1
    if (!iteration) cluster_wait();  // the other blocks' mbarriers are initialised
    if (threadIdx.x == 0) mbarrier_expect_bytes(sums_arrived + parity, sizeof(table[0]));
    const float total = publish_partials<true>(sums, ref, table[parity], sums_arrived + parity);
    mbarrier_wait(sums_arrived + parity, iteration / 2 % 2);  // its phase flips at every second row
    __syncwarp();
#else
    const float total = publish_partials(sums, ref, table[parity]);
    row_barrier();
#endif
    // All sums are here, so every warp has read its part of the stage.
    if (threadIdx.x == 0) pipeline.issue_load(row + STAGES * row_step, stage);
    if (++stage == STAGES) stage = 0, phase ^= 1;
    const RowStatistics statistics =
        merge_partials(total, ref, table[parity], counts, inverse_columns, (float)eps);
    const float offset = -statistics.shift * statistics.rstd;
    if (!WEIGHTS_IN_REGISTERS && !iteration && slice.count) mbarrier_wait(weights_arrived, 0);
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = threadIdx.x + i * THREADS;
      if (!NO_TAIL && at >= slice.count) continue;
      const Pack x_at = in[i].value_discarding_floats();
      Weights w_at, b_at;
      w_at = WEIGHTS_IN_REGISTERS ? weight_words[i].value_discarding_floats() : weights[at];
      if (CENTRED)
        b_at = WEIGHTS_IN_REGISTERS ? bias_words[CENTRED ? i : 0].value_discarding_floats()
                                    : biases[at];
      Pack out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float diff = to_float(x_at.at[j]) - ref;
        const float xhat = CENTRED ? fmaf(diff, statistics.rstd, offset) : diff * statistics.rstd;
        const float scaled = xhat * to_float(w_at.at[j]);
        out.at[j] = from_float<WEFT_T>(CENTRED ? scaled + to_float(b_at.at[j]) : scaled);
      }
      reinterpret_cast<Pack*>(y + row * columns + from)[at] = out;
    }
  }
}

#endif
