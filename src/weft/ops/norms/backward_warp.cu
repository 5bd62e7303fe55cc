// Norms backward of short rows, dx = rstd (g w - mean(g w) - xhat mean(g w xhat)), and the sums of g xhat
// and of g for the gradients of weight and bias: LANES lanes of a warp have a row.
//
// A persistent grid: a group of LANES lanes takes every gridDim.x GROUPS-th row, and its lanes keep their
// columns' sums in registers over all their rows. A warp of 32 / LANES rows pays once for what a row costs
// besides its elements: shuffles, statistics, addresses. With a whole warp a row, 64 columns in bf16 left 24
// of 32 lanes empty and reached 17 % of copying on an H200 (results/nvidia-h200/row-lengths.json). The next
// row's loads are issued before this row is computed; no barrier is needed until the end, where the groups'
// sums are added up in the order of the groups: one partial row a block.
// g, x and (RESIDUAL) grad_s, the gradient of s: (rows, columns), with row strides; dx, dr: contiguous;
// partials: (2 or 1, blocks, columns) float32. Bytes: 2n read + n written (RESIDUAL: 3n + 2n). Dynamic shared
// memory: table_pitch(columns) floats for each group.
//
// Rows may begin at any element (PEEL in row_view.cuh). A group's rows are then a multiple of N apart, which
// the host ensures: they are all cut alike, and a lane has the same columns in all of them. Where an input
// begins elsewhere in its 16 bytes than dx, the aligned blocks of its first and last vector reach into the
// neighbouring rows, before the tensor into the 16 bytes in which it begins, and never past its end: rows of
// whole vectors have no edges, whatever their address. With edges of at least N elements, rows of 64 columns
// reached 39 % of copying
// (results/nvidia-h200/row-lengths-norms-backward-2026-11-24.txt).
#define PEEL_MARGIN 0
#include "norm.cuh"

#ifndef VECS_PER_THREAD
#define VECS_PER_THREAD 2
#endif
#ifndef LANES
#define LANES 32
#endif
#ifndef NO_TAIL
#define NO_TAIL 0  // 1: every lane has all its vectors
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif
#ifndef EXACT_MEAN
#define EXACT_MEAN (sizeof(WEFT_T) == 4)  // the reference of the sums, as in row_statistics.cuh
#endif

extern __shared__ __align__(128) unsigned char memory[];

static_assert(!(PEEL && NO_TAIL), "a row with edges is cut where its address says");
constexpr int GROUPS = THREADS / LANES, THREAD_COLUMNS = VECS_PER_THREAD * N;
constexpr int EDGES = Edges<LANES>::COUNT, SOME_EDGES = EDGES ? EDGES : 1;

// Sums of x - reference, of its square, of g w, and of g w (x - reference).
enum { DIFF, SQUARE, GW, DOT, NUM_SUMS };

// What a lane has of a row of one tensor: vectors LANES apart, and edges (row_view.cuh). Elements of vectors
// past the row's end are 0.
struct LaneRow {
  Pack body[VECS_PER_THREAD];
  WEFT_T edges[SOME_EDGES];
};

// The same as it is loaded, a row ahead. A vector cut out of its blocks at once, or an edge converted at
// once, would wait for its load a whole row too early.
struct LoadedRow {
  BodyBlocks<VECS_PER_THREAD, LANES> body;
  WEFT_T edges[SOME_EDGES];

  __device__ __forceinline__ void load(const WEFT_T* row, const RowView& view, int first, const WEFT_T* end) {
    body.load(row + view.head, view.vecs, first, end);
#pragma unroll
    for (int k = 0; k < EDGES; ++k)
      if (first + k * LANES < view.edges) edges[k] = row[view.edge_column(first + k * LANES)];
  }
  __device__ __forceinline__ LaneRow cut(int past) const {
    LaneRow row;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) row.body[i] = body.cut(i, past);
#pragma unroll
    for (int k = 0; k < EDGES; ++k) row.edges[k] = edges[k];
    return row;
  }
};

template <typename Row> struct Inputs { Row g, x, grad_s; };

// The value about which a row's sums are taken: its mean (EXACT_MEAN), or the mean of its first vector.
__device__ __forceinline__ float row_reference(const LaneRow& x, const RowView& view, int first,
                                               float inverse_columns) {
  if (!CENTRED) return 0.0f;
  if (EXACT_MEAN) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) total += element(x.body[i], j);
#pragma unroll
    for (int k = 0; k < EDGES; ++k)
      if (first + k * LANES < view.edges) total += to_float(x.edges[k]);
    return warp_sum<LANES>(total) * inverse_columns;
  }
  float sum[N];
#pragma unroll
  for (int j = 0; j < N; ++j) sum[j] = element(x.body[0], j);
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; ++j) sum[j] += sum[j + step];
  return __shfl_sync(0xffffffffu, sum[0] * (1.0f / N), (int)threadIdx.x % 32 / LANES * LANES);
}

// Keeps the compiler from working on two vectors at once, which would spill registers.
__device__ __forceinline__ void one_vector_at_a_time() {
  if (VECS_PER_THREAD > 1) asm volatile("" ::: "memory");
}

// What a row's second pass needs: xhat = (x - reference) rstd + offset, and the two means times rstd.
struct Row {
  float ref, rstd, offset, mean_gw, mean_gw_xhat;

  __device__ __forceinline__ Row(float ref_, Sums<NUM_SUMS> sums, float inverse_columns, float eps)
      : ref(ref_) {
#pragma unroll
    for (int k = 0; k < NUM_SUMS; ++k)
      if (CENTRED || k == SQUARE || k == DOT) sums.at[k] = warp_sum<LANES>(sums.at[k]) * inverse_columns;
    const float shift = CENTRED ? sums.at[DIFF] : 0.0f, mean = CENTRED ? sums.at[GW] : 0.0f;
    const float variance = not_below_zero(fmaf(-shift, shift, sums.at[SQUARE])) + eps;
    // 16-bit outputs do not show the last bit of the root; the precise one is a call.
    rstd = sizeof(WEFT_T) == 2 ? rsqrtf(variance) : inverse_root(variance);
    offset = -shift * rstd;
    mean_gw = mean * rstd;
    mean_gw_xhat = fmaf(-shift, mean, sums.at[DOT]) * rstd * rstd;
  }
  // dx of one element, without the gradient of s. Adds the element to the sums of its column.
  __device__ __forceinline__ float gradient(float g, float x, float weight, float& dw, float& db) const {
    const float diff = x - ref, xhat = CENTRED ? fmaf(diff, rstd, offset) : diff * rstd;
    const float projection = CENTRED ? fmaf(xhat, mean_gw_xhat, mean_gw) : xhat * mean_gw_xhat;
    dw = fmaf(g, xhat, dw);
    if (CENTRED) db += g;
    return fmaf(g * weight, rstd, -projection);
  }
};

// Neighbouring lanes write columns that are N apart: one column in 33 is skipped, so that the columns of
// eight vectors lie in different banks.
__device__ __forceinline__ int table_at(int column) { return column + column / 32; }
__device__ __forceinline__ int table_pitch(int columns) { return table_at(columns) + 1; }

// A lane's sums over the rows of its group: of g xhat, and of g.
struct ColumnSums {
  float body[1 + CENTRED][THREAD_COLUMNS] = {}, edges[1 + CENTRED][SOME_EDGES] = {};

  // Adds up the sums of the block's groups, in the order of the groups, and writes the block's partial rows.
  __device__ __forceinline__ void write(float* partials, const RowView& view, int columns) const {
    const int first = threadIdx.x % LANES, group = threadIdx.x / LANES, pitch = table_pitch(columns);
    float* const table = reinterpret_cast<float*>(memory);
    float* const own = table + group * pitch;
#pragma unroll
    for (int which = 0; which <= CENTRED; ++which) {
      if (which) __syncthreads();
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        const int at = first + i * LANES;
        if (!NO_TAIL && at >= view.vecs) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) own[table_at(view.head + at * N + j)] = body[which][i * N + j];
      }
#pragma unroll
      for (int k = 0; k < EDGES; ++k)
        if (first + k * LANES < view.edges)
          own[table_at(view.edge_column(first + k * LANES))] = edges[which][k];
      __syncthreads();
      for (int column = threadIdx.x; column < columns; column += THREADS) {
        float sum = 0.0f;
#pragma unroll 8
        for (int k = 0; k < GROUPS; ++k) sum += table[k * pitch + table_at(column)];
        partials[((index_t)which * gridDim.x + blockIdx.x) * columns + column] = sum;
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
norm_backward_warp(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ grad_s,
                   const WEFT_T* __restrict__ x, const WEFT_W* __restrict__ w, WEFT_T* __restrict__ dx,
                   WEFT_T* __restrict__ dr, float* __restrict__ partials, index_t rows, index_t columns,
                   index_t g_stride, index_t grad_s_stride, index_t x_stride, double eps) {
  const int first = threadIdx.x % LANES;
  // A warp continues while any of its rows exists, since every lane takes part in the shuffles. It has
  // 32 / LANES rows; `row - within` is the first of them.
  const int within = threadIdx.x % 32 / LANES;
  const index_t step = (index_t)gridDim.x * GROUPS;
  const float inverse_columns = __frcp_rn((float)columns);
  index_t row = (index_t)blockIdx.x * GROUPS + threadIdx.x / LANES;
  const RowView view(dx + row * columns, columns);
  const auto in_row = [&](int i) { return NO_TAIL || first + i * LANES < view.vecs; };
  const auto load = [&](Inputs<LoadedRow>& inputs, index_t from_row) {
    RowView part = view;
    if (NO_TAIL) part.vecs = LANES * VECS_PER_THREAD;
    if (from_row >= rows) part.vecs = part.edges = 0;
    const auto load_row = [&](LoadedRow& loaded, const WEFT_T* tensor, index_t stride) {
      loaded.load(tensor + from_row * stride, part, first,
                  end_of_last(tensor, from_row, rows, columns, stride));
    };
    load_row(inputs.g, g, g_stride);
    load_row(inputs.x, x, x_stride);
    if (RESIDUAL) load_row(inputs.grad_s, grad_s, grad_s_stride);
  };
  // All rows of a group begin equally far behind a multiple of 16 bytes.
  const int g_past = Body<Pack>(g + row * g_stride + view.head).past;
  const int x_past = Body<Pack>(x + row * x_stride + view.head).past;
  const int grad_s_past = Body<Pack>(grad_s + row * grad_s_stride + view.head).past;
  Inputs<LoadedRow> next;
  load(next, row);
  const Columns w_body(w, view.head, columns);
  Weights weights[VECS_PER_THREAD] = {};
  float edge_weights[SOME_EDGES] = {};
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i)
    if (in_row(i)) weights[i] = w_body[first + i * LANES];
#pragma unroll
  for (int k = 0; k < EDGES; ++k)
    if (first + k * LANES < view.edges) edge_weights[k] = to_float(w[view.edge_column(first + k * LANES)]);
  ColumnSums column_sums;
  for (; row - within < rows; row += step) {
    Inputs<LaneRow> now = {next.g.cut(g_past), next.x.cut(x_past)};
    if (RESIDUAL) now.grad_s = next.grad_s.cut(grad_s_past);
    load(next, row + step);
    const float ref = row_reference(now.x, view, first, inverse_columns);
    Sums<NUM_SUMS> sums = {};
    const auto add = [&](float grad, float value, float weight) {
      const float diff = value - ref, gw = grad * weight;
      sums.at[DIFF] += diff;
      sums.at[SQUARE] = fmaf(diff, diff, sums.at[SQUARE]);
      sums.at[GW] += gw;
      sums.at[DOT] = fmaf(gw, diff, sums.at[DOT]);
    };
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (!in_row(i)) continue;  // zeros past the end would count as -reference
      one_vector_at_a_time();
#pragma unroll
      for (int j = 0; j < N; ++j)
        add(element(now.g.body[i], j), element(now.x.body[i], j), element(weights[i], j));
    }
#pragma unroll
    for (int k = 0; k < EDGES; ++k)
      if (first + k * LANES < view.edges)
        add(to_float(now.g.edges[k]), to_float(now.x.edges[k]), edge_weights[k]);
    const Row statistics(ref, sums, inverse_columns, (float)eps);
    if (row >= rows) continue;
    WEFT_T* const out = dx + row * columns;
    WEFT_T* const out_s = dr + row * columns;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = first + i * LANES;
      if (!in_row(i)) continue;
      one_vector_at_a_time();
      if (VECS_PER_THREAD > 1) discard_floats(now.x.body[i]), discard_floats(now.g.body[i]);
      Pack result;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int column = i * N + j;
        float d = statistics.gradient(element(now.g.body[i], j), element(now.x.body[i], j),
                                      element(weights[i], j), column_sums.body[0][column],
                                      column_sums.body[CENTRED][column]);
        if (RESIDUAL) d += element(now.grad_s.body[i], j);
        result.at[j] = from_float<WEFT_T>(d);
      }
      reinterpret_cast<Pack*>(out + view.head)[at] = result;
      if (RESIDUAL) reinterpret_cast<Pack*>(out_s + view.head)[at] = result;
    }
#pragma unroll
    for (int k = 0; k < EDGES; ++k) {
      if (first + k * LANES >= view.edges) continue;
      float d = statistics.gradient(to_float(now.g.edges[k]), to_float(now.x.edges[k]), edge_weights[k],
                                    column_sums.edges[0][k], column_sums.edges[CENTRED][k]);
      if (RESIDUAL) d += to_float(now.grad_s.edges[k]);
      const int column = view.edge_column(first + k * LANES);
      out[column] = from_float<WEFT_T>(d);
      if (RESIDUAL) out_s[column] = from_float<WEFT_T>(d);
    }
  }
  column_sums.write(partials, view, columns);
}
