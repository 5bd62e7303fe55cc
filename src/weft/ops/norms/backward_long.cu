// Norms backward of long rows by clusters: dx = rstd (g w - mean(g w) - xhat mean(g w xhat)), each row read
// once, and the sums of g xhat and of g for the gradients of weight and bias.
//
// Clusters take the rows, as long_rows.cuh describes. The computing warps keep their columns' sums in
// registers over all their rows: one partial row for each segment of rows that begin equally.
// g, x and (RESIDUAL) grad_s, the gradient of s: (rows, columns), with row strides; dx, dr: contiguous;
// partials: (2 or 1, parts, columns) float32; at most 2^30 rows. WITH_DROPOUT: dx is the gradient of dropout.
// Bytes: 2n read + n written (RESIDUAL: 3n + 2n). Shared memory: the slice of w unless WEIGHTS_IN_REGISTERS,
// then the stages.
#define ONE_FLOAT_MEAN (sizeof(WEFT_T) == 2)
#include "backward_row.cuh"
#include "long_rows.cuh"

#if __CUDA_ARCH__ >= 900

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS + 32, BLOCKS_PER_SM)
norm_backward_long(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ grad_s,
                   const WEFT_T* __restrict__ x, const WEFT_W* __restrict__ w, WEFT_T* __restrict__ dx,
                   WEFT_T* __restrict__ dr, float* __restrict__ partials, index_t rows, index_t columns,
                   index_t g_stride, index_t grad_s_stride, index_t x_stride, double eps,
                   index_t cycle DROPOUT_PARAMETERS) {
  __shared__ unsigned long long barriers[STAGES + 3 * TABLES];
  __shared__ float warp_tables[TABLES][WARPS * NUM_FIELDS];
  __shared__ float block_tables[TABLES][CLUSTER * NUM_FIELDS];
  __shared__ RowTerms terms_tables[TABLES];
  const int most_vectors = ((int)columns / N + CLUSTER - 1) / CLUSTER;  // of a slice
  const int weight_bytes = WEIGHTS_IN_REGISTERS ? 0 : (most_vectors * (int)sizeof(Weights) + 127) / 128 * 128;
  Weights* const shared_weights = reinterpret_cast<Weights*>(memory);
  Stages stages = {{g, x}, {g_stride, x_stride}, memory + weight_bytes, (most_vectors + IS_SHIFTED) * 16,
                   barriers, barriers + STAGES, barriers + STAGES + TABLES, barriers + STAGES + 2 * TABLES};
  if (RESIDUAL) stages.source[1 + RESIDUAL] = grad_s, stages.stride[1 + RESIDUAL] = grad_s_stride;
  const RowOrder order((int)rows, (int)cycle);
  const Producer producer = start_rows(order, stages, dx, (int)columns);
  if (threadIdx.x >= THREADS) {
    coordinate(producer, order, stages, {warp_tables, block_tables, terms_tables}, dx, (int)columns,
               (float)eps);
    return;
  }
  const int first = threadIdx.x;
  int stage = 0, phase = 0;
  unsigned k = 0;
  for (const unsigned total_rows = order.count(); k < total_rows;) {
    const Segment segment = order.segment(k);
    const Layout layout(dx, segment.first, (int)columns);
    const int count = layout.slice.count;
    int past[TENSORS];
#pragma unroll
    for (int t = 0; t < TENSORS; ++t) past[t] = stages.past(t, segment.first, layout.from);
    const auto in_slice = [&](int v) { return NO_TAIL || first + v * THREADS < count; };
    const Columns w_body(w, layout.from, columns);
    // Floats, where registers allow: a conversion in each pass is a tenth of all instructions.
    Vector<float, N> weights[VECS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = first + i * THREADS;
      if (!in_slice(i)) continue;
      // In shared memory too, a thread reads only what it wrote itself: no barrier is needed.
      const Weights one = w_body[at];
      if (!WEIGHTS_IN_REGISTERS) shared_weights[at] = one;
#pragma unroll
      for (int j = 0; WEIGHTS_IN_REGISTERS && j < N; ++j) weights[i].at[j] = to_float(one.at[j]);
    }
    const auto weights_at = [&](int v) {
      if constexpr (WEIGHTS_IN_REGISTERS) return weights[v];
      else return shared_weights[first + v * THREADS];
    };
    Edge edge(layout.view, w, layout.has_edges() && first < 32);
    const auto load_edge = [&](int row) {
      edge.load(g + row * g_stride, x + row * x_stride, grad_s + row * grad_s_stride);
    };
    load_edge(segment.first);
    EdgeInputs edge_now = {}, edge_before = {};
    ColumnSums sums = {};
    int stage_before = 0;
    for (int i = 0; i <= segment.count; ++i) {
      const int row = segment.first + i * segment.step;
      if (i < segment.count) {  // the sums of this row
        const unsigned table = k % TABLES;
        mbarrier_wait(stages.arrived + stage, phase);
        edge_now = edge.loaded();
        if (PEEL && i + 1 < segment.count) load_edge(row + segment.step);
        const Body<Pack> x_row = stages.stage_row(1, stage, past);
        const float ref = stage_reference(x_row, count, edge_now.x, edge.in_warp ? edge.count : 0);
        PartialSums own = {};
#pragma unroll
        for (int v = 0; v < VECS_PER_THREAD; ++v) {
          const int at = first + v * THREADS;
          if (!in_slice(v)) continue;
          if (VECS_PER_THREAD > 2) asm volatile("" ::: "memory");  // one vector at a time: two would spill
          add_vector(own, x_row[at], stages.stage_row(0, stage, past)[at], weights_at(v), ref);
        }
        if (edge.exists) add_element(own, edge_now.x - ref, edge_now.g * edge.weight);
        publish_sums(own, ref, warp_tables[table], stages.summed + table);
      }
      if (i) {  // dx of the row before
        const unsigned table = (k - 1) % TABLES;
        mbarrier_wait(stages.ready + table, (k - 1) / TABLES % 2);
        const RowTerms terms = terms_tables[table];
        const index_t before = (index_t)(row - segment.step);
        const index_t to = before * (PEEL ? (int)columns : layout.slice.per_row * N) + layout.from;
#pragma unroll
        for (int v = 0; v < VECS_PER_THREAD; ++v) {
          const int at = first + v * THREADS;
          if (!in_slice(v)) continue;
          if (VECS_PER_THREAD > 2) asm volatile("" ::: "memory");  // one vector at a time: two would spill
          const Pack x_at = stages.stage_row(1, stage_before, past)[at];
          const Pack g_at = stages.stage_row(0, stage_before, past)[at];
          const Pack grad_s_at = RESIDUAL ? stages.stage_row(1 + RESIDUAL, stage_before, past)[at] : x_at;
          write_vector(terms, g_at, x_at, grad_s_at, weights_at(v), sums, v, dx, dr, to, at, DROPOUT);
        }
        edge.write(edge_before, terms, dx + before * columns, dr + before * columns);
      }
      if (i == segment.count) break;
      edge_before = edge_now, stage_before = stage;
      if (++stage == STAGES) stage = 0, phase ^= 1;
      ++k;
    }
    float* const part = partials + (index_t)segment.part * columns;
    const index_t g_offset = (index_t)order.parts() * columns;
    write_team_sums(sums, part + layout.from, g_offset, count * N);
    edge.write_sums(part, g_offset);
    if (PEEL && segment.skips_part) {
      const ColumnSums none = {};
      write_team_sums(none, part - columns + layout.from, g_offset, count * N);
      edge.sums[0] = edge.sums[CENTRED] = 0.0f;
      edge.write_sums(part - columns, g_offset);
    }
  }
}

#endif
