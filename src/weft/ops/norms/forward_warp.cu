// Norms forward of short rows, y = (x - mean) rstd w + b or x rstd w: LANES lanes of a warp have a row.
//
// A lane holds VECS_PER_THREAD vectors of the row, LANES apart, and no barrier is needed. LANES times
// VECS_PER_THREAD is close to the row's vectors: 40 vectors take 8 lanes of 5, where a whole warp would leave
// 24 of its 64 places empty. Two passes over registers: the mean, then sums about it.
// x, r: (rows, columns), with row strides; w, b: (columns,); y, s: (rows, columns) contiguous. Rows may begin
// at any element (PEEL in row_view.cuh). Bytes: n read + n written; with RESIDUAL 2n + 2n.
#define PEEL_MARGIN 0  // see BodyBlocks
#include "norm.cuh"

#ifndef VECS_PER_THREAD
#define VECS_PER_THREAD 4
#endif
#ifndef LANES
#define LANES 32
#endif

// The part of a row that a lane has. Elements past the row's end are 0.
struct LaneRow {
  Pack body[VECS_PER_THREAD];
  Edges<LANES> edges;

  // `end` as in BodyBlocks.
  __device__ __forceinline__ void load(const WEFT_T* row, const RowView& view, int first, const WEFT_T* end) {
    BodyBlocks<VECS_PER_THREAD, LANES> blocks;
    blocks.load(row + view.head, view.vecs, first, end);
    edges.load(row, view, first, 0.0f);
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) body[i] = blocks.cut(i, Body<Pack>(row + view.head).past);
  }
  // Adds r, rounds to the dtype, and writes the sum to the row `s`.
  __device__ __forceinline__ void add(const LaneRow& r, WEFT_T* s, const RowView& view, int first) {
    Pack* const to = reinterpret_cast<Pack*>(s + view.head);
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      body[i] = add_residual(body[i], r.body[i]);
      if (first + i * LANES < view.vecs) to[first + i * LANES] = body[i];
    }
#pragma unroll
    for (int k = 0; k < Edges<LANES>::COUNT; ++k)
      edges.at[k] = to_float(from_float<WEFT_T>(edges.at[k] + r.edges.at[k]));
    edges.store(s, view, first, [&](int k) { return edges.at[k]; });
  }
  __device__ __forceinline__ float sum() const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) total += element(body[i], j);
#pragma unroll
    for (int k = 0; k < Edges<LANES>::COUNT; ++k) total += edges.at[k];
    return total;
  }
  // The sums of x - mean and of its square.
  __device__ __forceinline__ Sums<2> about(float mean, const RowView& view, int first) const {
    Sums<2> sums = {};
    const auto add = [&](float value) {
      const float diff = value - mean;
      sums.at[0] += diff;
      sums.at[1] = fmaf(diff, diff, sums.at[1]);
    };
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (first + i * LANES >= view.vecs) continue;  // zeros past the end would count as -mean
#pragma unroll
      for (int j = 0; j < N; ++j) add(element(body[i], j));
    }
#pragma unroll
    for (int k = 0; k < Edges<LANES>::COUNT; ++k)
      if (first + k * LANES < view.edges) add(edges.at[k]);
    return sums;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
norm_warp(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r, const WEFT_W* __restrict__ w,
          const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y, WEFT_T* __restrict__ s, index_t rows,
          index_t columns, index_t x_stride, index_t r_stride, double eps) {
  const int first = threadIdx.x % LANES;
  const index_t step = (index_t)gridDim.x * (THREADS / LANES);
  // A warp continues while any of its rows exists, since every lane takes part in the shuffles. It has
  // 32 / LANES rows; `row - within` is the first of them.
  const int within = threadIdx.x % 32 / LANES;
  const float inverse_columns = __frcp_rn((float)columns);
  index_t row = (index_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  for (; row - within < rows; row += step) {
    WEFT_T* const out = y + row * columns;
    const RowView view(out, row < rows ? columns : 0);
    LaneRow in, residual;
    in.load(x + row * x_stride, view, first, end_of_last(x, row, rows, columns, x_stride));
    if (RESIDUAL) {
      residual.load(r + row * r_stride, view, first, end_of_last(r, row, rows, columns, r_stride));
      in.add(residual, s + row * columns, view, first);
    }
    const float mean = CENTRED ? warp_sum<LANES>(in.sum()) * inverse_columns : 0.0f;
    const Sums<2> sums = in.about(mean, view, first);
    // The mean of x - mean is the rounding error of the mean (see norm_multi_pass in forward.cu).
    const float correction = CENTRED ? warp_sum<LANES>(sums.at[0]) * inverse_columns : 0.0f;
    const float square = warp_sum<LANES>(sums.at[1]) * inverse_columns;
    const float rstd = inverse_root(not_below_zero(square - correction * correction) + (float)eps);
    const float offset = -correction * rstd;
    const auto normalised = [&](float value, WEFT_W weight, WEFT_W bias) {
      const float diff = value - mean, xhat = CENTRED ? fmaf(diff, rstd, offset) : diff * rstd;
      const float scaled = xhat * to_float(weight);
      return CENTRED ? scaled + to_float(bias) : scaled;
    };
    const Columns weights(w, view.head, columns), biases(b, view.head, columns);
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = first + i * LANES;
      if (at >= view.vecs) continue;
      const Weights scale = weights[at], shift = CENTRED ? biases[at] : scale;
      discard_floats(in.body[i]);
      Pack result;
#pragma unroll
      for (int j = 0; j < N; ++j)
        result.at[j] = from_float<WEFT_T>(normalised(element(in.body[i], j), scale.at[j], shift.at[j]));
      reinterpret_cast<Pack*>(out + view.head)[at] = result;
    }
    in.edges.store(out, view, first, [&](int k) {
      const int column = view.edge_column(first + k * LANES);
      return normalised(in.edges.at[k], w[column], b[column]);
    });
  }
}
