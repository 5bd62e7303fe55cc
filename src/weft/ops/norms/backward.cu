// Norms backward by a persistent kernel: dx = rstd (g w - mean(g w) - xhat mean(g w xhat)), each row
// read once, and the sums of g xhat and of g for the gradients of weight and bias.
//
// A team (some warps of a block, a block, or a cluster of blocks) takes one row after another and
// keeps its columns' sums in registers over all its rows. Rows come through a pipeline of STAGES
// stages in shared memory, filled by the bulk copy engine (TMA), so that loads never wait for
// arithmetic. One pass over a row in registers takes all statistics (row_statistics.cuh), so that a
// row costs one barrier; a second pass writes dx. A team of one warp reads the stage again for the
// second pass: its rows then need no registers in between, and its sums, its weights and four warps
// a scheduler fit. At the end the teams of a block add up their sums: one partial row a block.
// g, x and (RESIDUAL) grad_s, the gradient of s: (rows, columns), with row strides; dx, dr:
// contiguous; partials: (2 or 1, blocks or clusters, columns) float32. Rows are multiples of 16
// bytes; at most 2^30 rows. Bytes: 2n read + n written (RESIDUAL: 3n + 2n). WITH_DROPOUT: dx is
// dropout's gradient of dr. Shared memory: the slice of w unless WEIGHTS_IN_REGISTERS, then the
// pipelines; the teams' sums reuse it after the last row.
//
// PEEL 1 and 2: a row begins at any element; with PEEL 1 equally far behind a multiple of 16 bytes in g, x,
// grad_s and dx, with PEEL 2 anywhere in each of them. Rows that are a multiple of N apart then begin
// equally, and the host launches a multiple of so many blocks or clusters (fewer, if rows that are fewer
// apart begin equally, such as rows of whole vectors): all rows of a block are cut alike
// (row_view.cuh), a thread has the same columns in all of them, and the first warp of a team takes the
// edges, one a lane. With PEEL 2 a stage has one more vector: from the last multiple of 16 bytes before the
// slice, because bulk copies begin at one, to the end of the vector in which the slice ends.
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#define BACKWARD 1
#include "hopper.cuh"
#include "row_statistics.cuh"

#ifndef STAGES
#define STAGES 3
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif
#ifndef WEIGHTS_IN_REGISTERS
#define WEIGHTS_IN_REGISTERS 0
#endif
#ifndef LOOKAHEAD
#define LOOKAHEAD 0  // 1: a cluster sums the next row while the sums of this one travel between its blocks
#endif

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

static_assert(!SINGLE_REFERENCE || CLUSTER == 1,
              "only the first block of a cluster has the row's first elements");
static_assert(MOST_EDGES <= 32 && !(PEEL && (NO_TAIL || WITH_DROPOUT)), "see PEEL above");
constexpr bool IS_SHIFTED = PEEL == 2;
// THREAD_COLUMNS floats of running sums (twice as many with a bias) stay in registers for the whole kernel:
// they, not the row, limit the vectors of a thread.
constexpr int TENSORS = 2 + RESIDUAL, THREAD_COLUMNS = VECS_PER_THREAD * N;
// A second reading of the stage frees the registers in between. More warps need a second barrier before the
// stage may be overwritten, which pays with LOOKAHEAD.
constexpr bool READ_STAGE_TWICE = TEAM == 32 || LOOKAHEAD;
static_assert(!LOOKAHEAD || (CLUSTER > 1 && STAGES > 2), "two rows are in use, and a third is on its way");
// Tables of partial sums. A block publishes row r + TABLES when all warps of the cluster have published row
// r + TABLES - 1 - LOOKAHEAD, and with it have read the sums of the row 1 + LOOKAHEAD before that one.
constexpr int TABLES = LOOKAHEAD ? 4 : 2;
using ThreadRow = Pack[VECS_PER_THREAD];

// Rows of a team: the first, and every row_step() after it. With PEEL the first rows of a block's teams are
// gridDim.x / CLUSTER apart, so that they begin equally.
__device__ __forceinline__ int first_row() {
  const int cluster = blockIdx.x / CLUSTER, team = threadIdx.x / TEAM;
  return PEEL ? cluster + gridDim.x / CLUSTER * team : cluster * TEAMS + team;
}
__device__ __forceinline__ int row_step() { return gridDim.x / CLUSTER * TEAMS; }

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

  // An empty slice (the last block of a cluster may have one) issues no copy: a bulk copy of 0 bytes is
  // invalid.
  __device__ __forceinline__ void issue_load(int row, int to_stage) {
    if (row >= rows || !bytes) return;
    unsigned char* at = base + to_stage * TENSORS * bytes;
    mbarrier_expect_bytes(arrived + to_stage, TENSORS * bytes);
#pragma unroll
    for (int t = 0; t < TENSORS; ++t)
      bulk_copy(at + t * bytes, reinterpret_cast<const char*>(source[t] + row * stride[t]) - past[t], bytes,
                arrived + to_stage);
  }

  // Initialises the mbarriers and issues the first loads. The barrier between lets no thread wait on
  // an mbarrier before it is initialised, and no block write to another that has not started.
  __device__ __forceinline__ void start() {
    if (IS_SHIFTED) {
#pragma unroll
      for (int t = 0; t < TENSORS; ++t)
        past[t] = (int)((unsigned long long)(source[t] + first_row() * stride[t]) % 16);
    }
    if (is_producer())
      for (int k = 0; k < STAGES; ++k) init_mbarriers(arrived + k);
#if CLUSTER > 1
    cluster_barrier();
#else
    team_barrier();
#endif
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

// Adds one element to a thread's sums: its distance from the reference, and its g w.
__device__ __forceinline__ void add_element(PartialSums& sums, float diff, float gw) {
  if (CENTRED) {
    sums.at[0] += diff;
    sums.at[NUM_SUMS / 2] += gw;
  }
  sums.at[SQUARES] = fmaf(diff, diff, sums.at[SQUARES]);
  // The sum of g w (x - reference): merge_partials moves it to the row's mean, so that one pass suffices.
  sums.at[DOT] = fmaf(gw, diff, sums.at[DOT]);
}

// This thread's sums of a row about `ref`. Weights come from `in_registers` or `in_shared`.
__device__ __forceinline__ PartialSums thread_sums(const ThreadRow& x, const ThreadRow& g,
                                                   const Weights (&in_registers)[VECS_PER_THREAD],
                                                   const Weights* in_shared, float ref, int first,
                                                   int count) {
  PartialSums sums = {};
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    if (!NO_TAIL && first + i * TEAM >= count) continue;
    const Weights w = WEIGHTS_IN_REGISTERS ? in_registers[i] : in_shared[first + i * TEAM];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float diff = element(x[i], j) - ref;
      add_element(sums, diff, element(g[i], j) * element(w, j));
    }
  }
  return sums;
}

// The element that a lane has of its team's rows besides its vectors, an edge, and its sums over the rows.
struct Edge {
  bool exists, in_warp;  // this lane has one; its warp has some
  int column, count;     // count: of the row's edges
  float weight;
  WEFT_T next_g, next_x, next_grad_s;  // a conversion at the load would wait for it: 0.9 us a row on an H200
  float sums[1 + CENTRED] = {};

  __device__ __forceinline__ Edge(const RowView& view, const WEFT_W* w) : count(view.edges) {
    in_warp = PEEL && blockIdx.x % CLUSTER == 0 && threadIdx.x % TEAM < 32;
    exists = in_warp && (int)threadIdx.x % TEAM < view.edges;
    column = exists ? view.edge_column(threadIdx.x % TEAM) : 0;
    weight = exists ? to_float(w[column]) : 0.0f;
  }
  // Issues the loads of a row's edge, which the next pass of the row loop uses.
  __device__ __forceinline__ void load(const WEFT_T* g, const WEFT_T* x, const WEFT_T* grad_s) {
    if (!exists) return;
    next_g = g[column];
    next_x = x[column];
    if (RESIDUAL) next_grad_s = grad_s[column];
  }
  // The edge's dx; `diff` is x - reference. Adds to the sums.
  __device__ __forceinline__ WEFT_T gradient(float g, float diff, float grad_s, const RowStatistics& row) {
    const float xhat = (diff - row.shift) * row.rstd;
    const float d = (g * weight - row.mean_gw - xhat * row.mean_gw_xhat) * row.rstd;
    sums[0] = fmaf(g, xhat, sums[0]);
    if (CENTRED) sums[CENTRED] += g;
    return from_float<WEFT_T>(RESIDUAL ? d + grad_s : d);
  }
};

// publish publishes the thread's sums of a row; wait_for_sums waits until all threads of the row have done
// so; row_statistics then reads them. There is another version for a single reference.
#if SINGLE_REFERENCE
using Table = WarpEntry[ROW_WARPS];
__device__ __forceinline__ float publish(const PartialSums& sums, float, Table& table, unsigned long long*) {
  return publish_partials(sums, table);
}
__device__ __forceinline__ void wait_for_sums(unsigned long long*, unsigned) { row_barrier(); }
__device__ __forceinline__ RowStatistics row_statistics(float total, float, const Table& table,
                                                        const WarpCounts&, float inverse_columns,
                                                        float eps) {
  return add_partials(total, table, inverse_columns, eps);
}
#else
// Blocks of a cluster count the arriving bytes on an mbarrier: the cluster's own barrier would also
// wait for their stores of dx.
using Table = float[ROW_WARPS * NUM_FIELDS];
__device__ __forceinline__ float publish(const PartialSums& sums, float ref, Table& table,
                                         unsigned long long* sums_arrived) {
#if CLUSTER > 1
  if (threadIdx.x == 0) mbarrier_expect_bytes(sums_arrived, sizeof(table));
  return publish_partials<true>(sums, ref, table, sums_arrived);
#else
  return publish_partials(sums, ref, table);
#endif
}
__device__ __forceinline__ void wait_for_sums(unsigned long long* sums_arrived, unsigned phase) {
#if CLUSTER > 1
  mbarrier_wait(sums_arrived, phase);
  __syncwarp();
#else
  row_barrier();
#endif
}
__device__ __forceinline__ RowStatistics row_statistics(float total, float ref, const Table& table,
                                                        const WarpCounts& counts,
                                                        float inverse_columns, float eps) {
  return merge_partials(total, ref, table, counts, inverse_columns, eps);
}
#endif

// A row whose sums this thread has published: its reference, the lane's total, its stage, its edge.
struct PublishedRow {
  float ref, total;
  int stage;
  float edge_g, edge_x, edge_grad_s;
};

// What the second pass over a row needs, computed once.
struct RowTerms {
  float ref, rstd, offset, mean_gw, mean_gw_xhat, mean, slope;

  __device__ __forceinline__ RowTerms(const RowStatistics& row, float ref_)
      : ref(ref_), rstd(row.rstd), offset(-row.shift * row.rstd), mean_gw(row.mean_gw * row.rstd),
        mean_gw_xhat(row.mean_gw_xhat * row.rstd), mean(ref_ + row.shift),
        slope(mean_gw_xhat * row.rstd) {}  // `slope` includes rstd twice: for xhat and for dx

  // dx of an element, without the gradient of s. Adds the element to its column's sums over all rows of a
  // team, in float32, in the order of the rows; norm_sum_partials adds the blocks' sums.
  __device__ __forceinline__ float gradient(float g, float x, float weight, float& dw, float& db) const {
    if (CENTRED) db += g;
#if SINGLE_REFERENCE
    // `scaled` has the factor rstd that `diff` lacks: their product is g xhat.
    const float diff = x - mean, scaled = g * rstd;
    dw = fmaf(scaled, diff, dw);
    return fmaf(scaled, weight, -(CENTRED ? fmaf(diff, slope, mean_gw) : diff * slope));
#else
    const float diff = x - ref, xhat = CENTRED ? fmaf(diff, rstd, offset) : diff * rstd;
    dw = fmaf(g, xhat, dw);
    return fmaf(g * weight, rstd, -(CENTRED ? fmaf(xhat, mean_gw_xhat, mean_gw) : xhat * mean_gw_xhat));
#endif
  }
};

// A partial row begins at any float where a row has any length.
__device__ __forceinline__ void store_four(float* to, const float* four) {
  if (PEEL) {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = four[j];
  } else {
    *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
  }
}

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
__device__ __forceinline__ void write_partials(const float (&sums)[1 + CENTRED][THREAD_COLUMNS],
                                               float* partials, index_t g_offset, int columns) {
  // One team: its sums are the block's, and go from registers to memory without a barrier.
  if (TEAMS == 1) {
#pragma unroll
    for (int k = 0; k < (1 + CENTRED) * THREAD_COLUMNS; k += 4) {
      const float* four = &sums[k / THREAD_COLUMNS][k % THREAD_COLUMNS];
      const int e = k % THREAD_COLUMNS, at = ((int)threadIdx.x + e / N * TEAM) * N + e % N;
      if (at >= columns) continue;
      store_four(partials + k / THREAD_COLUMNS * g_offset + at, four);
    }
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

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_PER_SM)
norm_backward(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ grad_s,
              const WEFT_T* __restrict__ x, const WEFT_W* __restrict__ w, WEFT_T* __restrict__ dx,
              WEFT_T* __restrict__ dr, float* __restrict__ partials, index_t rows, index_t columns,
              index_t g_stride, index_t grad_s_stride, index_t x_stride,
              double eps DROPOUT_PARAMETERS) {
  __shared__ unsigned long long arrived[TEAMS][STAGES];
  __shared__ Table table[TABLES][TEAMS];
  __shared__ unsigned long long sums_arrived[TABLES];
  __shared__ float edge_table[PEEL ? TEAMS : 1][1 + CENTRED][32];
  const RowView view(dx + (index_t)(blockIdx.x / CLUSTER) * columns, columns);
  const Slice slice(view.vecs);
  const int team = threadIdx.x / TEAM, first = threadIdx.x % TEAM;
  const int bytes = slice.count ? (slice.count + IS_SHIFTED) * 16 : 0;
  const index_t from = view.head + (index_t)slice.begin * N;
  Weights* const shared_weights = reinterpret_cast<Weights*>(memory);
  // Bulk copies need 16-byte addresses; the pipelines start at the next multiple of 128.
  unsigned char* pipelines =
      memory +
      (WEIGHTS_IN_REGISTERS ? 0 : (slice.per_block * (int)sizeof(Weights) + 127) / 128 * 128);
  RowPipeline pipeline = {{g + from, x + from}, {g_stride, x_stride}, (int)rows, bytes,
                          pipelines + team * STAGES * TENSORS * bytes, arrived[team]};
  if (RESIDUAL) {
    pipeline.source[1 + RESIDUAL] = grad_s + from;
    pipeline.stride[1 + RESIDUAL] = grad_s_stride;
  }
  Weights weights[VECS_PER_THREAD];
  if (CLUSTER > 1 && threadIdx.x == 0) init_mbarriers(sums_arrived, TABLES);
  if (!WEIGHTS_IN_REGISTERS) pipeline.start();
  Edge edge(view, w);
  if (first_row() < rows)
    edge.load(g + first_row() * g_stride, x + first_row() * x_stride, grad_s + first_row() * grad_s_stride);
  const Columns w_body(w, from, columns);
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const int at = first + i * TEAM;
    if (!NO_TAIL && at >= slice.count) continue;
    const Weights one = w_body[at];
    if (WEIGHTS_IN_REGISTERS) weights[i] = one; else if (team == 0) shared_weights[at] = one;
  }
  if (WEIGHTS_IN_REGISTERS) pipeline.start(); else __syncthreads();
  const WarpCounts counts = warp_counts(slice.per_row, slice.per_block, view.edges);
  const float inverse_columns = __frcp_rn((float)columns);
  float column_sums[1 + CENTRED][THREAD_COLUMNS] = {};
  PublishedRow published = {};
  int publications = 0, finished = 0;  // rows; table n % TABLES has the sums of row n
  for (int row = first_row() - LOOKAHEAD * row_step(); row < rows; row += row_step()) {
    const int summed = row + LOOKAHEAD * row_step();  // the row of the first pass
    const PublishedRow previous = published;
    ThreadRow gs, xs, grads_s;
    if (!LOOKAHEAD || summed < rows) {
      pipeline.wait_for_row();
      published = {0, 0, pipeline.stage};
      if (edge.exists) {
        published.edge_g = to_float(edge.next_g), published.edge_x = to_float(edge.next_x);
        if (RESIDUAL) published.edge_grad_s = to_float(edge.next_grad_s);
      }
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        const int at = first + i * TEAM;
        const bool in_slice = NO_TAIL || at < slice.count;
        gs[i] = in_slice ? pipeline.stage_row(0, pipeline.stage)[at] : zeros();
        xs[i] = in_slice ? pipeline.stage_row(1, pipeline.stage)[at] : zeros();
        if (RESIDUAL && !READ_STAGE_TWICE)
          grads_s[i] = in_slice ? pipeline.stage_row(1 + RESIDUAL, pipeline.stage)[at] : zeros();
      }
      const index_t next = summed + row_step();
      if (PEEL && next < rows)
        edge.load(g + next * g_stride, x + next * x_stride, grad_s + next * grad_s_stride);
#if SINGLE_REFERENCE
      published.ref = row_reference(pipeline.stage_row(1, pipeline.stage));
#else
      published.ref = warp_reference(xs, slice.count, published.edge_x,
                                     edge.in_warp ? edge.count : 0);
#endif
      PartialSums sums = thread_sums(xs, gs, weights, shared_weights, published.ref, first, slice.count);
      if (edge.exists)
        add_element(sums, published.edge_x - published.ref, published.edge_g * edge.weight);
      const int at = publications++ % TABLES;
      published.total = publish(sums, published.ref, table[at][team], sums_arrived + at);
      pipeline.next_stage();
    }
    if (LOOKAHEAD && row < 0) continue;
    const PublishedRow current = LOOKAHEAD ? previous : published;
    const int from_table = finished % TABLES;
    wait_for_sums(sums_arrived + from_table, finished++ / TABLES % 2);
    if (!READ_STAGE_TWICE) pipeline.reload(row, current.stage);
    const RowStatistics statistics = row_statistics(current.total, current.ref, table[from_table][team],
                                                    counts, inverse_columns, (float)eps);
    const RowTerms terms(statistics, current.ref);
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = first + i * TEAM;
      if (!NO_TAIL && at >= slice.count) continue;
      if (SINGLE_REFERENCE) asm volatile("" ::: "memory");  // one vector at a time: two would spill
      const Weights v = WEIGHTS_IN_REGISTERS ? weights[i] : shared_weights[at];
      if (READ_STAGE_TWICE) {
        gs[i] = pipeline.stage_row(0, current.stage)[at];
        xs[i] = pipeline.stage_row(1, current.stage)[at];
        if (RESIDUAL) grads_s[i] = pipeline.stage_row(1 + RESIDUAL, current.stage)[at];
      } else {
        discard_floats(xs[i]);
        discard_floats(gs[i]);
      }
      const index_t row_start = (index_t)row * (PEEL ? (int)columns : slice.per_row * N) + from;
      const index_t to = row_start / N + at;  // without PEEL
      Pack out;
      float ds[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float d = terms.gradient(element(gs[i], j), element(xs[i], j), element(v, j),
                                 column_sums[0][i * N + j], column_sums[CENTRED][i * N + j]);
        // The gradient that reaches s directly is added in float32, before the only rounding.
        if (RESIDUAL) d += element(grads_s[i], j);
        ds[j] = d;
        out.at[j] = from_float<WEFT_T>(d);
      }
      // dr is the gradient of the residual: dropout does not apply to it, and to dx it does.
      if (RESIDUAL)
        (PEEL ? reinterpret_cast<Pack*>(dr + row_start)[at] : reinterpret_cast<Pack*>(dr)[to]) = out;
      if (WITH_DROPOUT) {
        DROPOUT.apply(ds, to * N);
#pragma unroll
        for (int j = 0; j < N; ++j) out.at[j] = from_float<WEFT_T>(ds[j]);
      }
      (PEEL ? reinterpret_cast<Pack*>(dx + row_start)[at] : reinterpret_cast<Pack*>(dx)[to]) = out;
      // Keeps the compiler from working on two vectors at once, which would spill registers.
      if (WITH_DROPOUT && READ_STAGE_TWICE && NO_TAIL) __syncwarp();
    }
    if (edge.exists) {
      const WEFT_T d = edge.gradient(current.edge_g, current.edge_x - current.ref, current.edge_grad_s,
                                     statistics);
      dx[(index_t)row * columns + edge.column] = d;
      if (RESIDUAL) dr[(index_t)row * columns + edge.column] = d;
    }
    if (READ_STAGE_TWICE) {
      team_barrier();
      pipeline.reload(row, current.stage);
    }
  }
  partials += blockIdx.x / CLUSTER * columns;
  write_partials(column_sums, partials + from, gridDim.x / CLUSTER * columns, slice.count * N);
  if (PEEL) write_edges(edge, edge_table, partials, gridDim.x / CLUSTER * columns);
}

#endif
