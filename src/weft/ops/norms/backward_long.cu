// Norms backward of long rows by clusters: dx = rstd (g w - mean(g w) - xhat mean(g w xhat)), each row read
// once, and the sums of g xhat and of g for the gradients of weight and bias.
//
// A cluster of CLUSTER blocks (1 to 16) takes one row after another. A block has THREADS threads that
// compute, which keep their columns' sums in registers over all their rows, and one more warp that
// coordinates: it issues the bulk copies (TMA) of the rows to STAGES stages in shared memory, merges the sums
// of the block's warps, exchanges them with the other blocks of the cluster, and computes the row's terms.
// The computing warps sum row k and then write dx of row k - 1, whose terms arrived meanwhile: they wait for
// no shuffle, no square root and no other block, and meet at no barrier. Where all warps of a cluster merged
// the sums of all warps themselves, between barriers, layer norm reached 56 to 66 % of copying on an H200
// above 8192 columns (results/nvidia-h200/row-lengths-norms-backward-2026-11-24.txt).
// g, x and (RESIDUAL) grad_s, the gradient of s: (rows, columns), with row strides; dx, dr: contiguous;
// partials: (2 or 1, parts, columns) float32; at most 2^30 rows. WITH_DROPOUT: dx is the gradient of dropout.
// Bytes: 2n read + n written (RESIDUAL: 3n + 2n). Shared memory: the slice of w unless WEIGHTS_IN_REGISTERS,
// then the stages.
//
// PEEL 1 and 2: a row begins at any element (row_view.cuh). Rows that are `cycle` apart begin equally in all
// tensors and are cut alike. The rows are sorted by their number modulo `cycle`, and a cluster takes a
// stretch of equal length: it begins anew, with other columns for its threads and another partial row, where
// rows of another kind begin. With PEEL 2 a stage has one more vector: from the last multiple of 16 bytes
// before the slice, because bulk copies begin at one, to the end of the vector in which the slice ends.
#define ONE_FLOAT_MEAN (sizeof(WEFT_T) == 2)
#include "backward_row.cuh"

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

static_assert(TEAM == THREADS && STAGES >= 3, "two rows are in use, and a third is on its way");
constexpr int WARPS = THREADS / 32;
// Tables of sums and of terms. A block sends the sums of row k when its warps have the terms of row k - 2,
// for which every block had read the table of row k - 3: a table is free after three rows.
constexpr int TABLES = 4;

// Rows first, first + step, ...: `count` rows of a cluster that begin equally. `part` is their partial row;
// nobody has the one before it if `skips_part`.
struct Segment {
  int first, step, count, part;
  bool skips_part;
};

// The order of a cluster's rows.
struct RowOrder {
  int rows, cycle, cluster, clusters, begin, end;  // begin, end: in the sorted rows

  __device__ __forceinline__ RowOrder(int rows_, int cycle_)
      : rows(rows_), cycle(PEEL ? cycle_ : 1), cluster(blockIdx.x / CLUSTER), clusters(gridDim.x / CLUSTER) {
    begin = (int)((index_t)rows * cluster / clusters);
    end = (int)((index_t)rows * (cluster + 1) / clusters);
  }
  __device__ __forceinline__ int count() const {
    return cycle == 1 ? (rows - cluster + clusters - 1) / clusters : end - begin;
  }
  __device__ __forceinline__ int parts() const { return clusters + min(cycle, rows) - 1; }

  // The segment after the first `done` rows of this cluster.
  __device__ __forceinline__ Segment segment(int done) const {
    // Adjacent rows for clusters that run at the same time.
    if (cycle == 1) return {cluster, clusters, count(), cluster, false};
    // Of the kinds 0 to cycle - 1 of rows, the first `longer` have a row more than the others.
    const int at = begin + done, size = rows / cycle, longer = rows % cycle;
    int kind = at / (size + 1);
    if (kind >= longer) kind = longer + (at - longer * (size + 1)) / size;
    const int start = kind * size + min(kind, longer), stop = start + size + (kind < longer);
    // Each new kind and each new cluster begins a part. Where both begin at one row, a part stays empty.
    const bool skips_part = at == start && done == 0 && kind > 0 && cluster > 0;
    return {kind + (at - start) * cycle, cycle, min(stop, end) - at, cluster + kind, skips_part};
  }
};

// How the rows of a segment are cut: the row's body and edges, this block's slice of the body, its first
// column.
struct Layout {
  RowView view;
  Slice slice;
  index_t from;

  __device__ __forceinline__ Layout(const WEFT_T* dx, int first_row, int columns)
      : view(dx + (index_t)first_row * columns, columns), slice(view.vecs),
        from(view.head + (index_t)slice.begin * N) {}
  __device__ __forceinline__ bool has_edges() const { return PEEL && blockIdx.x % CLUSTER == 0; }
  // Bytes of the slice in a stage; an empty slice (the last block of a cluster may have one) has none.
  __device__ __forceinline__ int bytes() const { return slice.count ? (slice.count + IS_SHIFTED) * 16 : 0; }
};

// Stages of shared memory, each with a slice of each of TENSORS tensors, and the barriers of a block.
struct Stages {
  const WEFT_T* source[TENSORS];
  index_t stride[TENSORS];
  unsigned char* base;
  int slice_bytes;              // room for a slice
  unsigned long long* arrived;  // STAGES mbarriers: the bytes of a row
  unsigned long long* summed;   // TABLES mbarriers: all warps have published their sums
  unsigned long long* merged;   // TABLES mbarriers: the sums of all blocks have arrived
  unsigned long long* ready;    // TABLES mbarriers: the terms of a row

  // Bytes from the last multiple of 16 to the slice of tensor t in a row.
  __device__ __forceinline__ int past(int t, int row, index_t from) const {
    return IS_SHIFTED ? (int)((unsigned long long)(source[t] + row * stride[t] + from) % 16) : 0;
  }
  __device__ __forceinline__ void issue_load(int row, const Layout& layout, int stage) const {
    const int bytes = layout.bytes();
    mbarrier_expect_bytes(arrived + stage, TENSORS * bytes);
    if (!bytes) return;  // a bulk copy of 0 bytes is invalid
#pragma unroll
    for (int t = 0; t < TENSORS; ++t) {
      const WEFT_T* const slice = source[t] + row * stride[t] + layout.from;
      bulk_copy(base + (stage * TENSORS + t) * slice_bytes,
                reinterpret_cast<const char*>(slice) - past(t, row, layout.from), bytes, arrived + stage);
    }
  }
  // Tensor t of the row in a stage.
  __device__ __forceinline__ Body<Pack> stage_row(int t, int stage, const int (&past)[TENSORS]) const {
    return {reinterpret_cast<const Pack*>(base + (stage * TENSORS + t) * slice_bytes), past[t]};
  }
};

struct Tables {
  float (*warps)[WARPS * NUM_FIELDS];     // a block's warps
  float (*blocks)[CLUSTER * NUM_FIELDS];  // a cluster's blocks
  RowTerms* terms;
};

// ---- The warp that coordinates

// The sums of a block's warps, moved to the reference of its first warp, in a lane of each warp's number.
__device__ __forceinline__ PartialSums moved_sums(const float* table, float count, float& ref) {
  const int lane = threadIdx.x % 32;
  float field[NUM_FIELDS];
#pragma unroll
  for (int k = 0; k < NUM_FIELDS; ++k) field[k] = lane < WARPS ? table[lane * NUM_FIELDS + k] : 0.0f;
  PartialSums sums;
#pragma unroll
  for (int k = 0; k < NUM_SUMS; ++k) sums.at[k] = field[k];
  ref = 0.0f;
  if (CENTRED) {
    ref = __shfl_sync(0xffffffffu, field[NUM_FIELDS - 1], 0);
    const float away = lane < WARPS ? field[NUM_FIELDS - 1] - ref : 0.0f, moved = count * away;
    sums.at[0] = field[0] + moved;
    sums.at[SQUARES] = fmaf(away, fmaf(2.0f, field[0], moved), field[SQUARES]);
    sums.at[DOT] = fmaf(away, field[NUM_SUMS / 2], field[DOT]);
  }
  return sums;
}

// Sends a block's sums to every block of the cluster. `total` is one of them, as reduce_scatter returns it.
__device__ __forceinline__ void send_sums(float total, float ref, float* table, unsigned long long* merged) {
  constexpr int LANES = 32 / NUM_SUMS;
  const int lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
  if (lane == 0) mbarrier_expect_bytes(merged, CLUSTER * NUM_FIELDS * 4);
  for (int to = lane % LANES; to < CLUSTER; to += LANES)
    send_to_block(to, table + rank * NUM_FIELDS + lane / LANES, total, merged);
  if (CENTRED && lane < CLUSTER) send_to_block(lane, table + rank * NUM_FIELDS + NUM_SUMS, ref, merged);
}

// Issues the loads of a cluster's rows, in their order.
struct Producer {
  int issued = 0, stage = 0, left = 0;  // rows; the next stage; rows left of the segment
  Segment segment = {};

  __device__ __forceinline__ void issue_next(const RowOrder& order, const Stages& stages, const WEFT_T* dx,
                                             int columns) {
    if (issued >= order.count()) return;
    if (!left) {
      segment = order.segment(issued);
      left = segment.count;
    }
    const int row = segment.first + (segment.count - left) * segment.step;
    stages.issue_load(row, Layout(dx, row, columns), stage);
    ++issued, --left;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
};

__device__ __forceinline__ void coordinate(Producer producer, const RowOrder& order, const Stages& stages,
                                           const Tables& tables, const WEFT_T* dx, int columns, float eps) {
  const int lane = threadIdx.x % 32, total_rows = order.count();
  const float inverse_columns = __frcp_rn((float)columns);
  for (int k = 0, segment_end = 0; k < total_rows;) {
    const Segment segment = order.segment(k);
    const Layout layout(dx, segment.first, columns);
    segment_end += segment.count;
    const int edges = layout.has_edges() && lane == 0 ? layout.view.edges : 0;
    const float count = lane < WARPS ? warp_vectors(lane, layout.slice.count) * N + edges : 0;
    const WarpCounts<CLUSTER> counts = block_counts(layout.slice, layout.view.edges);
    for (; k < segment_end; ++k) {
      const int table = k % TABLES, parity = k / TABLES % 2;
      mbarrier_wait(stages.summed + table, parity);
      // All warps have written dx of row k - 2: its stage is free.
      if (lane == 0 && k > 1) producer.issue_next(order, stages, dx, columns);
      float ref;
      const float total = reduce_scatter(moved_sums(tables.warps[table], count, ref));
#if CLUSTER > 1
      send_sums(total, ref, tables.blocks[table], stages.merged + table);
      mbarrier_wait(stages.merged + table, parity);
#endif
      const RowStatistics statistics =
          merge_partials(total, ref, tables.blocks[table], counts, inverse_columns, eps);
      if (lane == 0) {
        tables.terms[table] = RowTerms(statistics, ref);
        mbarrier_arrive(stages.ready + table);
      }
      __syncwarp();
    }
  }
}

// ---- The kernel

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
  Producer producer;
  if (threadIdx.x == THREADS) {
    init_mbarriers(stages.arrived, STAGES);
    init_mbarriers(stages.summed, TABLES, WARPS);
    init_mbarriers(stages.merged, 2 * TABLES);
    for (int k = 0; k < STAGES; ++k) producer.issue_next(order, stages, dx, (int)columns);
  }
  __syncthreads();  // the mbarriers are initialised before any thread of the cluster uses one
#if CLUSTER > 1
  cluster_barrier();
#endif
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
        ThreadRow xs;
#pragma unroll
        for (int v = 0; EXACT_MEAN && v < VECS_PER_THREAD; ++v)
          xs[v] = in_slice(v) ? stages.stage_row(1, stage, past)[first + v * THREADS] : zeros();
        const Body<Pack> of_warp(stages.stage_row(1, stage, past).base + first / 32 * 32, past[1]);
        float ref = 0.0f;
        if (EXACT_MEAN) ref = warp_reference(xs, count, edge_now.x, edge.in_warp ? edge.count : 0);
        else if (NO_TAIL || first / 32 * 32 < count) ref = mean_of_four(of_warp);
        PartialSums own = {};
#pragma unroll
        for (int v = 0; v < VECS_PER_THREAD; ++v) {
          const int at = first + v * THREADS;
          if (!in_slice(v)) continue;
          if (VECS_PER_THREAD > 2) asm volatile("" ::: "memory");  // one vector at a time: two would spill
          const Pack x_at = EXACT_MEAN ? xs[v] : stages.stage_row(1, stage, past)[at];
          add_vector(own, x_at, stages.stage_row(0, stage, past)[at], weights_at(v), ref);
        }
        if (edge.exists) add_element(own, edge_now.x - ref, edge_now.g * edge.weight);
        const float total = reduce_scatter(own);
        float* const fields = warp_tables[table] + first / 32 * NUM_FIELDS;
        if (first % (32 / NUM_SUMS) == 0) fields[first % 32 / (32 / NUM_SUMS)] = total;
        if (CENTRED && first % 32 == 0) fields[NUM_SUMS] = ref;
        __syncwarp();
        if (first % 32 == 0) mbarrier_arrive(stages.summed + table);
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
