// Norms backward by a persistent kernel: dx = rstd (g w - mean(g w) - xhat mean(g w xhat)), each row
// read once, and the sums of g xhat and of g for the gradients of weight and bias.
//
// A team (some warps of a block, or a block) takes one row after another and keeps its columns' sums in
// registers over all its rows. backward_long.cu is for rows that do not fit in a block. Rows come through a
// pipeline of STAGES stages in shared memory, filled by the bulk copy engine (TMA), so that loads never wait
// for arithmetic. One pass over a row in registers takes all statistics (row_statistics.cuh), so that a row
// costs one barrier; a second pass writes dx. A team of one warp reads the stage again for the second pass:
// its rows then need no registers in between, and its sums, its weights and four warps a scheduler fit. At
// the end the teams of a block add up their sums: one partial row a block.
// g, x and (RESIDUAL) grad_s, the gradient of s: (rows, columns), with row strides; dx, dr: contiguous;
// partials: (2 or 1, blocks, columns) float32; at most 2^30 rows. WITH_DROPOUT: dx is dropout's gradient.
// Bytes: 2n read + n written (RESIDUAL: 3n + 2n). Shared memory: w unless WEIGHTS_IN_REGISTERS, then the
// pipelines; the teams' sums reuse it after the last row.
//
// PEEL 1 and 2: a row begins at any element; with PEEL 1 equally far behind a multiple of 16 bytes in g, x,
// grad_s and dx, with PEEL 2 anywhere in each of them. Rows that are a multiple of N apart then begin
// equally, and the host launches a multiple of so many blocks (fewer, if rows that are fewer
// apart begin equally, such as rows of whole vectors): all rows of a block are cut alike
// (row_view.cuh), a thread has the same columns in all of them, and the first warp of a team takes the
// edges, one a lane. With PEEL 2 a stage has one more vector: from the last multiple of 16 bytes before the
// body, because bulk copies begin at one, to the end of the vector in which the body ends.
#include "backward_row.cuh"

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

static_assert(CLUSTER == 1, "see backward_long.cu");
// A second reading of the stage frees the registers in between. More warps would need a second barrier before
// the stage may be overwritten.
constexpr bool READ_STAGE_TWICE = TEAM == 32;

// Rows of a team: the first, and every row_step() after it. With PEEL the first rows of a block's teams are
// gridDim.x apart, so that they begin equally.
__device__ __forceinline__ int first_row() {
  const int team = threadIdx.x / TEAM;
  return PEEL ? blockIdx.x + gridDim.x * team : blockIdx.x * TEAMS + team;
}
__device__ __forceinline__ int row_step() { return gridDim.x * TEAMS; }

// A team's pipeline of rows: stage k holds one slice of `bytes` bytes of each of TENSORS tensors.
// The slice of row r of tensor t starts at source[t] + r stride[t], in its stage `past[t]` bytes after the
// start (0 unless PEEL is 2). The team's first thread issues the copies; an mbarrier for each stage counts
// their bytes.
struct RowPipeline {
  const WEFT_T* source[TENSORS];
  index_t stride[TENSORS];
  int rows;
  int bytes;
  unsigned char* base;
  unsigned long long* arrived;  // STAGES mbarriers
  int past[TENSORS] = {};
  int stage = 0;
  unsigned phase = 0;  // parity of the mbarriers; flips each time all stages have been used

  __device__ __forceinline__ bool is_producer() const { return threadIdx.x % TEAM == 0; }

  // A row without a body issues no copy: a bulk copy of 0 bytes is invalid.
  __device__ __forceinline__ void issue_load(int row, int to_stage) {
    if (row >= rows || !bytes) return;
    unsigned char* at = base + to_stage * TENSORS * bytes;
    mbarrier_expect_bytes(arrived + to_stage, TENSORS * bytes);
#pragma unroll
    for (int t = 0; t < TENSORS; ++t)
      bulk_copy(at + t * bytes, reinterpret_cast<const char*>(source[t] + row * stride[t]) - past[t], bytes,
                arrived + to_stage);
  }

  // Initialises the mbarriers and issues the first loads. The barrier between lets no thread wait on an
  // mbarrier before it is initialised.
  __device__ __forceinline__ void start() {
    if (IS_SHIFTED) {
#pragma unroll
      for (int t = 0; t < TENSORS; ++t)
        past[t] = (int)((unsigned long long)(source[t] + first_row() * stride[t]) % 16);
    }
    if (is_producer())
      for (int k = 0; k < STAGES; ++k) init_mbarriers(arrived + k);
    team_barrier();
    if (is_producer())
      for (int k = 0; k < STAGES; ++k) issue_load(first_row() + k * row_step(), k);
  }

  __device__ __forceinline__ void wait_for_row() {
    if (bytes) mbarrier_wait(arrived + stage, phase);
  }
  // Tensor t of the row in a stage.
  __device__ __forceinline__ Body<Pack> stage_row(int t, int in_stage) const {
    return {reinterpret_cast<const Pack*>(base + (in_stage * TENSORS + t) * bytes), past[t]};
  }

  // To be called when the whole team has read `row` in a stage: loads the row STAGES steps later there.
  __device__ __forceinline__ void reload(int row, int in_stage) {
    if (is_producer()) issue_load(row + STAGES * row_step(), in_stage);
  }
  __device__ __forceinline__ void next_stage() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// publish publishes the thread's sums of a row; after row_barrier row_statistics reads those of all threads
// of the row. There is another version for a single reference.
#if SINGLE_REFERENCE
using Table = WarpEntry[ROW_WARPS];
__device__ __forceinline__ float publish(const PartialSums& sums, float, Table& table) {
  return publish_partials(sums, table);
}
__device__ __forceinline__ RowStatistics row_statistics(float total, float, const Table& table,
                                                        const WarpCounts<>&, float inverse_columns,
                                                        float eps) {
  return add_partials(total, table, inverse_columns, eps);
}
#else
using Table = float[ROW_WARPS * NUM_FIELDS];
__device__ __forceinline__ float publish(const PartialSums& sums, float ref, Table& table) {
  return publish_partials(sums, ref, table);
}
__device__ __forceinline__ RowStatistics row_statistics(float total, float ref, const Table& table,
                                                        const WarpCounts<>& counts,
                                                        float inverse_columns, float eps) {
  return merge_partials(total, ref, table, counts, inverse_columns, eps);
}
#endif

// Adds up the sums of the edges of the block's teams, in the order of the teams, and writes them to the
// block's partial rows. `table` is shared memory that nothing else uses, an entry for each team.
__device__ __forceinline__ void write_edges(const Edge& edge, float (*table)[1 + CENTRED][32],
                                            float* partials, index_t g_offset) {
  const int team = threadIdx.x / TEAM, lane = threadIdx.x % TEAM;
#pragma unroll
  for (int k = 0; k <= CENTRED; ++k)
    if (edge.exists) table[team][k][lane] = edge.sums[k];
  __syncthreads();
  if (!edge.exists || team) return;
#pragma unroll
  for (int k = 0; k <= CENTRED; ++k) {
    float sum = 0.0f;
    for (int t = 0; t < TEAMS; ++t) sum += table[t][k][lane];
    partials[k * g_offset + edge.column] = sum;
  }
}

// Adds up the sums of the block's teams, in the order of the teams, and writes the block's partial
// rows, four columns a thread at a time. The sums of g start `g_offset` floats after those of g xhat.
__device__ __forceinline__ void write_partials(const ColumnSums& sums, float* partials, index_t g_offset,
                                               int columns) {
  // One team: its sums are the block's, and go from registers to memory without a barrier.
  if (TEAMS == 1) {
    write_team_sums(sums, partials, g_offset, columns);
    return;
  }
  // The elements of a thread's sums lie THREADS floats apart, so that neighbouring threads write to
  // neighbouring banks. The first barrier ends all reads of the pipelines, whose memory this reuses.
  float* const all = reinterpret_cast<float*>(memory);
  __syncthreads();
#pragma unroll
  for (int e = 0; e < (1 + CENTRED) * THREAD_COLUMNS; ++e)
    all[e * THREADS + threadIdx.x] = sums[e / THREAD_COLUMNS][e % THREAD_COLUMNS];
  __syncthreads();
  for (int k = threadIdx.x; k < (1 + CENTRED) * THREAD_COLUMNS / 4 * TEAM; k += THREADS) {
    const int first = k % TEAM, from = k / TEAM * 4, e = from % THREAD_COLUMNS;
    const int column = (first + e / N * TEAM) * N + e % N;
    float four[4] = {};
#pragma unroll
    for (int t = 0; t < TEAMS; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] += all[(from + j) * THREADS + t * TEAM + first];
    if (column < columns) store_four(partials + from / THREAD_COLUMNS * g_offset + column, four);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
norm_backward(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ grad_s,
              const WEFT_T* __restrict__ x, const WEFT_W* __restrict__ w, WEFT_T* __restrict__ dx,
              WEFT_T* __restrict__ dr, float* __restrict__ partials, index_t rows, index_t columns,
              index_t g_stride, index_t grad_s_stride, index_t x_stride,
              double eps DROPOUT_PARAMETERS) {
  __shared__ unsigned long long arrived[TEAMS][STAGES];
  __shared__ Table table[2][TEAMS];
  __shared__ float edge_table[PEEL ? TEAMS : 1][1 + CENTRED][32];
  const RowView view(dx + (index_t)blockIdx.x * columns, columns);
  const Slice slice(view.vecs);
  const int team = threadIdx.x / TEAM, first = threadIdx.x % TEAM;
  const int bytes = slice.count ? (slice.count + IS_SHIFTED) * 16 : 0;
  Weights* const shared_weights = reinterpret_cast<Weights*>(memory);
  // Bulk copies need 16-byte addresses; the pipelines start at the next multiple of 128.
  unsigned char* pipelines =
      memory + (WEIGHTS_IN_REGISTERS ? 0 : (slice.count * (int)sizeof(Weights) + 127) / 128 * 128);
  RowPipeline pipeline = {{g + view.head, x + view.head}, {g_stride, x_stride}, (int)rows, bytes,
                          pipelines + team * STAGES * TENSORS * bytes, arrived[team]};
  if (RESIDUAL) {
    pipeline.source[1 + RESIDUAL] = grad_s + view.head;
    pipeline.stride[1 + RESIDUAL] = grad_s_stride;
  }
  Weights weights[VECS_PER_THREAD];
  if (!WEIGHTS_IN_REGISTERS) pipeline.start();
  Edge edge(view, w, first < 32);
  const auto load_edge = [&](index_t row) {
    if (row < rows) edge.load(g + row * g_stride, x + row * x_stride, grad_s + row * grad_s_stride);
  };
  load_edge(first_row());
  const Columns w_body(w, view.head, columns);
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const int at = first + i * TEAM;
    if (!NO_TAIL && at >= slice.count) continue;
    const Weights one = w_body[at];
    if (WEIGHTS_IN_REGISTERS) weights[i] = one; else if (team == 0) shared_weights[at] = one;
  }
  if (WEIGHTS_IN_REGISTERS) pipeline.start(); else __syncthreads();
  const WarpCounts<> counts = warp_counts(slice.per_row, slice.per_block, view.edges);
  const float inverse_columns = __frcp_rn((float)columns);
  ColumnSums column_sums = {};
  int parity = 0;  // of the table of sums
  for (int row = first_row(); row < rows; row += row_step(), parity ^= 1) {
    pipeline.wait_for_row();
    const int stage = pipeline.stage;
    const EdgeInputs edge_inputs = edge.loaded();
    ThreadRow gs, xs, grads_s;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = first + i * TEAM;
      const bool in_slice = NO_TAIL || at < slice.count;
      gs[i] = in_slice ? pipeline.stage_row(0, stage)[at] : zeros();
      xs[i] = in_slice ? pipeline.stage_row(1, stage)[at] : zeros();
      if (RESIDUAL && !READ_STAGE_TWICE)
        grads_s[i] = in_slice ? pipeline.stage_row(1 + RESIDUAL, stage)[at] : zeros();
    }
    if (PEEL) load_edge((index_t)row + row_step());
#if SINGLE_REFERENCE
    const float ref = mean_of_four(pipeline.stage_row(1, stage));
#else
    const float ref = warp_reference(xs, slice.count, edge_inputs.x, edge.in_warp ? edge.count : 0);
#endif
    PartialSums sums = {};
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = first + i * TEAM;
      if (NO_TAIL || at < slice.count)
        add_vector(sums, xs[i], gs[i], WEIGHTS_IN_REGISTERS ? weights[i] : shared_weights[at], ref);
    }
    if (edge.exists) add_element(sums, edge_inputs.x - ref, edge_inputs.g * edge.weight);
    const float total = publish(sums, ref, table[parity][team]);
    row_barrier();
    if (!READ_STAGE_TWICE) pipeline.reload(row, stage);
    const RowTerms terms(
        row_statistics(total, ref, table[parity][team], counts, inverse_columns, (float)eps), ref);
    const index_t row_start = (index_t)row * (PEEL ? (int)columns : slice.per_row * N) + view.head;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = first + i * TEAM;
      if (!NO_TAIL && at >= slice.count) continue;
      if (SINGLE_REFERENCE) asm volatile("" ::: "memory");  // one vector at a time: two would spill
      const Weights v = WEIGHTS_IN_REGISTERS ? weights[i] : shared_weights[at];
      if (READ_STAGE_TWICE) {
        gs[i] = pipeline.stage_row(0, stage)[at];
        xs[i] = pipeline.stage_row(1, stage)[at];
        if (RESIDUAL) grads_s[i] = pipeline.stage_row(1 + RESIDUAL, stage)[at];
      } else {
        discard_floats(xs[i]);
        discard_floats(gs[i]);
      }
      write_vector(terms, gs[i], xs[i], grads_s[i], v, column_sums, i, dx, dr, row_start, at, DROPOUT);
      // Keeps the compiler from working on two vectors at once, which would spill registers.
      if (WITH_DROPOUT && READ_STAGE_TWICE && NO_TAIL) __syncwarp();
    }
    edge.write(edge_inputs, terms, dx + (index_t)row * columns, dr + (index_t)row * columns);
    if (READ_STAGE_TWICE) {
      team_barrier();
      pipeline.reload(row, stage);
    }
    pipeline.next_stage();
  }
  partials += blockIdx.x * columns;
  write_partials(column_sums, partials + view.head, gridDim.x * columns, slice.count * N);
  if (PEEL) write_edges(edge, edge_table, partials, gridDim.x * columns);
}

#endif
