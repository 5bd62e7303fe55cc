// Norms forward, y = (x - mean) rstd w + b or x rstd w: one block or cluster for each row or few rows.
//
// norm_block: a block, or CLUSTER blocks, holds ROWS rows in registers, VECS_PER_THREAD vectors a
// thread of each row. All loads are issued before the first is used; a row is read once, and one
// barrier serves all rows. Several rows share the reads of the weights: past 16384 columns weights
// come from L2 and are as many bytes as the row, or twice as many with a bias. PREFETCH_WEIGHTS
// issues their loads with the rows'.
// norm_multi_pass: rows of any length, read again from L2 for the variance and for the output.
// x, r: (rows, columns), with row strides; w, b: (columns,); y, s: (rows, columns) contiguous. In
// norm_block rows may begin at any element (PEEL in row_view.cuh): the first warp of a row takes its
// edges, one a thread.
// Bytes: n read + n written; with RESIDUAL 2n + 2n. WITH_DROPOUT: norm_block drops elements of x first.
#include "forward_row.cuh"

#ifndef PREFETCH_WEIGHTS
#define PREFETCH_WEIGHTS 0
#endif
// With a second bound of 1 the compiler would take all registers of an SM for one block.
#ifdef MIN_BLOCKS
#define BOUNDS __launch_bounds__(THREADS, MIN_BLOCKS)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif
#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

static_assert(!PEEL || (ROWS == 1 && !NO_TAIL && !PREFETCH_WEIGHTS && !WITH_DROPOUT && MOST_EDGES <= 32),
              "each row is cut in its own way, and one warp has all its edges");

extern "C" __global__ void CLUSTER_DIMS BOUNDS
norm_block(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
           const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
           WEFT_T* __restrict__ s, index_t rows, index_t columns, index_t x_stride,
           index_t r_stride, double eps DROPOUT_PARAMETERS) {
  // One table for each row, so that one barrier serves the sums of all ROWS rows.
  __shared__ float table[ROWS][ROW_WARPS * NUM_FIELDS];
#if CLUSTER > 1
  // A block may write to another's shared memory only after that block has started; the matching
  // wait comes just before the first write, so that the row's loads are in flight meanwhile.
  cluster_arrive();
#endif
  const index_t first_row = blockIdx.x / CLUSTER * (index_t)ROWS;
  const RowView view(y + first_row * columns, columns);
  const Slice slice(view.vecs);
  const index_t from = view.head + (index_t)slice.begin * N;
  const bool has_edge = PEEL && blockIdx.x % CLUSTER == 0 && (int)threadIdx.x < view.edges;
  const int edge_column = has_edge ? view.edge_column(threadIdx.x) : 0;
  float edge = has_edge ? to_float(x[first_row * x_stride + edge_column]) : 0.0f;
  if (RESIDUAL && has_edge) {
    const WEFT_T sum = from_float<WEFT_T>(edge + to_float(r[first_row * r_stride + edge_column]));
    s[first_row * columns + edge_column] = sum;
    edge = to_float(sum);
  }
  Pack in[ROWS][VECS_PER_THREAD], residual[ROWS][RESIDUAL ? VECS_PER_THREAD : 1];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    // Past the last row the last one is loaded again, and not written: no predicate on the loads.
    const index_t row = ROWS == 1 ? first_row : min(first_row + k, rows - 1);
    const Body<Pack> x_body(x + row * x_stride + from), r_body(r + row * r_stride + from);
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = threadIdx.x + i * THREADS;
      const bool exists = NO_TAIL || at < slice.count;
      in[k][i] = load_if(exists, [&] { return load_vector(x_body, at); });
      if (RESIDUAL) residual[k][RESIDUAL ? i : 0] = load_if(exists, [&] { return load_vector(r_body, at); });
    }
  }
  const Columns w_body(w, from, columns), b_body(b, from, columns);
  ThreadWeights weights;
  if (PREFETCH_WEIGHTS) weights.load(w_body, b_body, threadIdx.x, slice.count);
  float ref[ROWS], total[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    if (RESIDUAL) {
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        const int at = threadIdx.x + i * THREADS;
        const bool exists = NO_TAIL || at < slice.count;
        // Past the end zeros are added, which is cheaper than a branch; random words are worth one.
        if (WITH_DROPOUT && !exists) continue;
        const index_t first = (first_row + k) * columns + from;
        in[k][i] = add_residual(in[k][i], residual[k][RESIDUAL ? i : 0], DROPOUT, first + at * N);
        if (!exists || (k && first_row + k >= rows)) continue;
        reinterpret_cast<Pack*>(s + first)[at] = in[k][i];
      }
    }
    const bool has_edges = PEEL && blockIdx.x % CLUSTER == 0 && threadIdx.x < 32;  // of the warp
    ref[k] = warp_reference(in[k], slice.count, edge, has_edges ? view.edges : 0);
    PartialSums sums = thread_sums(in[k], ref[k], threadIdx.x, slice.count);
    if (has_edge) add_element(sums, edge, ref[k]);
#if CLUSTER > 1
    if (k == 0) cluster_wait();
#endif
    total[k] = publish_partials(sums, ref[k], table[k]);
  }
  row_barrier();
  const WarpCounts<> counts = warp_counts(slice.per_row, slice.per_block, view.edges);
  const float inverse_columns = __frcp_rn((float)columns);
  RowStatistics statistics[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k)
    statistics[k] = merge_partials(total[k], ref[k], table[k], counts, inverse_columns, (float)eps);
  write_rows<!PREFETCH_WEIGHTS>(in, ref, statistics, weights, w_body, b_body,
                                y + first_row * columns + from, columns, rows - first_row,
                                slice.count);
  if (has_edge)
    y[first_row * columns + edge_column] =
        normalised(edge, ref[0], statistics[0], w[edge_column], b[edge_column]);
}

#if !PEEL

extern "C" __global__ void __launch_bounds__(THREADS)
norm_multi_pass(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
                const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
                WEFT_T* s, index_t columns, index_t x_stride, index_t r_stride, double eps) {
  __shared__ Sums<1> first[32];
  __shared__ Sums<2> second[32];
  const index_t row = blockIdx.x;
  const int vectors = columns / N;
  const Pack* in = reinterpret_cast<const Pack*>(x + row * x_stride);
  float mean = 0.0f, correction = 0.0f, sum = 0.0f, squares = 0.0f;
  // First pass: the mean, and the sum with the residual, which is written once and read back below.
  if (RESIDUAL || CENTRED) {
#pragma unroll 4
    for (int at = threadIdx.x; at < vectors; at += THREADS) {
      Pack p = in[at];
      if (RESIDUAL) {
        p = add_residual(p, reinterpret_cast<const Pack*>(r + row * r_stride)[at]);
        reinterpret_cast<Pack*>(s + row * columns)[at] = p;
      }
#pragma unroll
      for (int j = 0; j < N; ++j) sum += to_float(p.at[j]);
    }
    if (CENTRED) mean = block_sums<1>({sum}, first).at[0] / columns;
    sum = 0.0f;
    // Each thread reads back only what it wrote itself, so no barrier is needed.
    if (RESIDUAL) in = reinterpret_cast<const Pack*>(s + row * columns);
  }
#pragma unroll 4
  for (int at = threadIdx.x; at < vectors; at += THREADS) {
    const Pack p = in[at];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float diff = to_float(p.at[j]) - mean;
      sum += diff;
      squares = fmaf(diff, diff, squares);
    }
  }
  // The mean of x - mean is the rounding error of the mean: subtracting it too keeps the digits of a
  // row far from zero.
  // A scratch of its own: the first one may still be read by a slow warp.
  const Sums<2> sums = block_sums<2>({sum, squares}, second);
  if (CENTRED) correction = sums.at[0] / columns;
  const float rstd =
      inverse_root(not_below_zero(sums.at[1] / columns - correction * correction) + (float)eps);
#pragma unroll 2
  for (int at = threadIdx.x; at < vectors; at += THREADS) {
    const Weights weights = reinterpret_cast<const Weights*>(w)[at];
    const Pack p = in[at];
    Weights biases;
    if (CENTRED) biases = reinterpret_cast<const Weights*>(b)[at];
    Pack out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float scaled =
          ((to_float(p.at[j]) - mean) - correction) * rstd * to_float(weights.at[j]);
      out.at[j] = from_float<WEFT_T>(CENTRED ? scaled + to_float(biases.at[j]) : scaled);
    }
    reinterpret_cast<Pack*>(y + row * columns)[at] = out;
  }
}

#endif
