// Norms forward of long rows by clusters: y = (x - mean) rstd w + b or x rstd w, each row read once.
//
// Clusters take the rows, as long_rows.cuh describes. The computing warps keep weights and biases of their
// columns in registers over all rows that begin equally: where each row's block loaded them again, and cut
// them out of aligned vectors, rows of odd length reached 57 to 72 % of copying on an H200
// (results/nvidia-h200/row-lengths.json).
// x: (rows, columns), with row strides; w, b: (columns,); y: (rows, columns) contiguous; at most 2^30 rows.
// Bytes: n read + n written. Shared memory: the stages.
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#define ONE_FLOAT_MEAN (sizeof(WEFT_T) == 2)
#include "forward_row.cuh"

constexpr int TENSORS = 1;
#include "long_rows.cuh"

#if __CUDA_ARCH__ >= 900

static_assert(!RESIDUAL && ROWS == 1, "");

// A row's edge that a lane has: its column, weight and bias, and the next row's element.
struct ForwardEdge {
  bool exists;
  int column, in_warp;  // in_warp: edges of the row that the warp has
  float weight, bias;
  WEFT_T next;  // not a float: a conversion would wait for the load

  __device__ __forceinline__ ForwardEdge(const Layout& layout, const WEFT_W* w, const WEFT_W* b) {
    in_warp = layout.has_edges() && threadIdx.x < 32 ? layout.view.edges : 0;
    exists = PEEL && (int)threadIdx.x < in_warp;
    column = exists ? layout.view.edge_column(threadIdx.x) : 0;
    weight = exists ? to_float(w[column]) : 0.0f;
    bias = CENTRED && exists ? to_float(b[column]) : 0.0f;
  }
  __device__ __forceinline__ void load(const WEFT_T* row) {
    if (exists) next = row[column];
  }
};

// One element of the output. The difference from a mean in one float is part of the offset.
struct Output {
  float ref, rstd, offset;

  __device__ __forceinline__ explicit Output(const RowTerms& terms)
      : ref(terms.ref), rstd(terms.rstd), offset(ONE_FLOAT_MEAN ? -terms.mean * terms.rstd : terms.offset) {}
  __device__ __forceinline__ WEFT_T operator()(float x, float weight, float bias) const {
    if (!CENTRED) return from_float<WEFT_T>(x * rstd * weight);
    return from_float<WEFT_T>(fmaf(fmaf(ONE_FLOAT_MEAN ? x : x - ref, rstd, offset), weight, bias));
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS + 32, 1)
norm_long(const WEFT_T* __restrict__ x, const WEFT_T*, const WEFT_W* __restrict__ w,
          const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y, WEFT_T*, index_t rows, index_t columns,
          index_t x_stride, index_t, double eps, index_t cycle) {
  __shared__ unsigned long long barriers[STAGES + 3 * TABLES];
  __shared__ float warp_tables[TABLES][WARPS * NUM_FIELDS];
  __shared__ float block_tables[TABLES][CLUSTER * NUM_FIELDS];
  __shared__ RowTerms terms_tables[TABLES];
  const int most_vectors = ((int)columns / N + CLUSTER - 1) / CLUSTER;  // of a slice
  const Stages stages = {{x}, {x_stride}, memory, (most_vectors + IS_SHIFTED) * 16, barriers,
                         barriers + STAGES, barriers + STAGES + TABLES, barriers + STAGES + 2 * TABLES};
  const RowOrder order((int)rows, (int)cycle);
  const Producer producer = start_rows(order, stages, y, (int)columns);
  if (threadIdx.x >= THREADS) {
    const Tables tables = {warp_tables, block_tables, terms_tables};
    coordinate(producer, order, stages, tables, y, (int)columns, (float)eps);
    return;
  }
  const int first = threadIdx.x;
  int stage = 0, phase = 0;
  unsigned k = 0;
  for (const unsigned total_rows = order.count(); k < total_rows;) {
    const Segment segment = order.segment(k);
    const Layout layout(y, segment.first, (int)columns);
    const int count = layout.slice.count;
    const int past[TENSORS] = {stages.past(0, segment.first, layout.from)};
    const auto in_slice = [&](int v) { return NO_TAIL || first + v * THREADS < count; };
    ThreadWeights weights;
    weights.load(Columns(w, layout.from, columns), Columns(b, layout.from, columns), first, count);
    ForwardEdge edge(layout, w, b);
    edge.load(x + segment.first * x_stride);
    float edge_now = 0.0f, edge_before = 0.0f;
    int stage_before = 0;
    for (int i = 0; i <= segment.count; ++i) {
      const index_t row = segment.first + (index_t)i * segment.step;
      if (i < segment.count) {  // the sums of this row
        const unsigned table = k % TABLES;
        mbarrier_wait(stages.arrived + stage, phase);
        if (edge.exists) edge_now = to_float(edge.next);
        if (PEEL && i + 1 < segment.count) edge.load(x + (row + segment.step) * x_stride);
        const Body<Pack> x_row = stages.stage_row(0, stage, past);
        const float ref = stage_reference(x_row, count, edge_now, edge.in_warp);
        PartialSums sums = {};
#pragma unroll
        for (int v = 0; v < VECS_PER_THREAD; ++v) {
          if (!in_slice(v)) continue;
          const Pack x_at = x_row[first + v * THREADS];
#pragma unroll
          for (int j = 0; j < N; ++j) add_element(sums, element(x_at, j), ref);
        }
        if (edge.exists) add_element(sums, edge_now, ref);
        publish_sums(sums, ref, warp_tables[table], stages.summed + table);
      }
      if (i) {  // the output of the row before
        const unsigned table = (k - 1) % TABLES;
        mbarrier_wait(stages.ready + table, (k - 1) / TABLES % 2);
        const Output output(terms_tables[table]);
        WEFT_T* const y_row = y + (row - segment.step) * (PEEL ? (int)columns : layout.slice.per_row * N);
        const Body<Pack> x_row = stages.stage_row(0, stage_before, past);
#pragma unroll
        for (int v = 0; v < VECS_PER_THREAD; ++v) {
          const int at = first + v * THREADS;
          if (!in_slice(v)) continue;
          const Pack x_at = x_row[at];
          discard_floats(weights.weight[v]);
          if (CENTRED) discard_floats(weights.bias[v * CENTRED]);
          Pack out;
#pragma unroll
          for (int j = 0; j < N; ++j)
            out.at[j] = output(element(x_at, j), element(weights.weight[v], j),
                               element(weights.bias[v * CENTRED], j));
          reinterpret_cast<Pack*>(y_row + layout.from)[at] = out;
        }
        if (edge.exists) y_row[edge.column] = output(edge_before, edge.weight, edge.bias);
      }
      if (i == segment.count) break;
      edge_before = edge_now, stage_before = stage;
      if (++stage == STAGES) stage = 0, phase ^= 1;
      ++k;
    }
  }
}

#endif
