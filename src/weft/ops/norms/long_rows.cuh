// Long rows by clusters of blocks that each have a warp that coordinates, for the forward and the backward.
//
// A cluster of CLUSTER blocks (1 to 16) takes one row after another. A block has THREADS threads that
// compute, and one more warp that coordinates: it issues the bulk copies (TMA) of the rows to STAGES stages
// in shared memory, merges the sums of the block's warps, exchanges them with the other blocks of the
// cluster, and computes the row's terms. The computing warps sum row k and then write the output of row
// k - 1, whose terms arrived meanwhile: they meet at no barrier. Where all warps of a cluster merged
// the sums of all warps themselves, between barriers, layer norm's backward reached 56 to 66 % of copying on
// an H200 above 8192 columns (results/nvidia-h200/row-lengths-norms-backward-2026-11-24.txt).
//
// PEEL 1 and 2: a row begins at any element (row_view.cuh). Rows that are `cycle` apart begin equally in all
// tensors and are cut alike. The rows are sorted by their number modulo `cycle`, and a cluster takes a
// stretch of equal length: it begins anew, with other columns for its threads and another partial row, where
// rows of another kind begin. With PEEL 2 a stage has one more vector: from the last multiple of 16 bytes
// before the slice, because bulk copies begin at one, to the end of the vector in which the slice ends.
//
// Included after row_statistics.cuh, with TENSORS, the tensors of which rows are read.
#pragma once

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

  __device__ __forceinline__ Layout(const WEFT_T* out, int first_row, int columns)
      : view(out + (index_t)first_row * columns, columns), slice(view.vecs),
        from(view.head + (index_t)slice.begin * N) {}
  __device__ __forceinline__ bool has_edges() const { return PEEL && blockIdx.x % CLUSTER == 0; }
  // Bytes of the slice in a stage; an empty slice (the last block of a cluster may have one) has none.
  __device__ __forceinline__ int bytes() const { return slice.count ? (slice.count + IS_SHIFTED) * 16 : 0; }
};

// Stages of shared memory, each with a slice of each of TENSORS tensors, and the barriers of a block.
struct Stages {
  const WEFT_T* source[3];
  index_t stride[3];
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

// Sums and terms of TABLES rows.
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
    if (BACKWARD) sums.at[DOT] = fmaf(away, field[NUM_SUMS / 2], field[DOT]);
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

  __device__ __forceinline__ void issue_next(const RowOrder& order, const Stages& stages,
                                             const WEFT_T* out, int columns) {
    if (issued >= order.count()) return;
    if (!left) {
      segment = order.segment(issued);
      left = segment.count;
    }
    const int row = segment.first + (segment.count - left) * segment.step;
    stages.issue_load(row, Layout(out, row, columns), stage);
    ++issued, --left;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
};

__device__ __forceinline__ void coordinate(Producer producer, const RowOrder& order, const Stages& stages,
                                           const Tables& tables, const WEFT_T* out, int columns, float eps) {
  const int lane = threadIdx.x % 32, total_rows = order.count();
  const float inverse_columns = __frcp_rn((float)columns);
  for (int k = 0, segment_end = 0; k < total_rows;) {
    const Segment segment = order.segment(k);
    const Layout layout(out, segment.first, columns);
    segment_end += segment.count;
    const int edges = layout.has_edges() && lane == 0 ? layout.view.edges : 0;
    const float count = lane < WARPS ? warp_vectors(lane, layout.slice.count) * N + edges : 0;
    const WarpCounts<CLUSTER> counts = block_counts(layout.slice, layout.view.edges);
    for (; k < segment_end; ++k) {
      const int table = k % TABLES, parity = k / TABLES % 2;
      mbarrier_wait(stages.summed + table, parity);
      // All warps have written the output of row k - 2: its stage is free.
      if (lane == 0 && k > 1) producer.issue_next(order, stages, out, columns);
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

// Initialises the mbarriers, issues the first loads, and returns what they continue. All threads of the
// cluster call it, before any uses an mbarrier.
__device__ __forceinline__ Producer start_rows(const RowOrder& order, const Stages& stages, const WEFT_T* out,
                                               int columns) {
  Producer producer;
  if (threadIdx.x == THREADS) {
    init_mbarriers(stages.arrived, STAGES);
    init_mbarriers(stages.summed, TABLES, WARPS);
    init_mbarriers(stages.merged, 2 * TABLES);  // and `ready`
    for (int k = 0; k < STAGES; ++k) producer.issue_next(order, stages, out, columns);
  }
  __syncthreads();
#if CLUSTER > 1
  cluster_barrier();
#endif
  return producer;
}

// ---- The warps that compute

// The value about which a warp sums its part of the row in a stage. `edge` and `edges` as in warp_reference.
__device__ __forceinline__ float stage_reference(const Body<Pack>& row, int count, float edge, int edges) {
  const int first = threadIdx.x / 32 * 32;
  if (!EXACT_MEAN) {
    const bool exists = NO_TAIL || first < count;
    return exists ? mean_of_four({row.base + first, row.past}) : 0.0f;
  }
  Pack x[VECS_PER_THREAD];
#pragma unroll
  for (int v = 0; v < VECS_PER_THREAD; ++v) {
    const int at = threadIdx.x + v * THREADS;
    x[v] = NO_TAIL || at < count ? row[at] : zeros();
  }
  return warp_reference(x, count, edge, edges);
}

// Publishes the warp's sums about `ref` in its block's table.
__device__ __forceinline__ void publish_sums(const PartialSums& sums, float ref, float* table,
                                             unsigned long long* summed) {
  const float total = reduce_scatter(sums);
  const int lane = threadIdx.x % 32;
  float* const fields = table + threadIdx.x / 32 * NUM_FIELDS;
  if (lane % (32 / NUM_SUMS) == 0) fields[lane / (32 / NUM_SUMS)] = total;
  if (CENTRED && lane == 0) fields[NUM_SUMS] = ref;
  __syncwarp();
  if (lane == 0) mbarrier_arrive(summed);
}

#endif
