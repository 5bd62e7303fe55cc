// Steps of the backward kernels whose threads keep the same columns in all their rows: sums of a row, its
// edges, its dx, and the sums of g xhat and of g over the rows.
//
// A team of TEAM threads has a row, or a slice of one; a thread has VECS_PER_THREAD vectors, TEAM vectors
// apart.
#pragma once
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#define BACKWARD 1
#include "hopper.cuh"
#include "row_statistics.cuh"

#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif
#ifndef WEIGHTS_IN_REGISTERS
#define WEIGHTS_IN_REGISTERS 0
#endif

static_assert(MOST_EDGES <= 32 && !(PEEL && (NO_TAIL || WITH_DROPOUT)), "one lane of a warp has an edge");
// THREAD_COLUMNS floats of running sums (twice as many with a bias) stay in registers for the whole kernel:
// they, not the row, limit the vectors of a thread.
constexpr int TENSORS = 2 + RESIDUAL, THREAD_COLUMNS = VECS_PER_THREAD * N;
using ThreadRow = Pack[VECS_PER_THREAD];
using ColumnSums = float[1 + CENTRED][THREAD_COLUMNS];  // of g xhat, and of g

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

// Adds a vector to a thread's sums about `ref`.
template <typename W>
__device__ __forceinline__ void add_vector(PartialSums& sums, const Pack& x, const Pack& g, const W& w,
                                           float ref) {
#pragma unroll
  for (int j = 0; j < N; ++j) add_element(sums, element(x, j) - ref, element(g, j) * element(w, j));
}

// An edge of a row: its elements of the inputs.
struct EdgeInputs { float g, x, grad_s; };

// The element that a lane has of its team's rows besides its vectors, an edge, and its sums over the rows.
// `has_edges`: this thread's warp takes them.
struct Edge {
  bool exists, in_warp;  // this lane has one; its warp has some
  int column, count;     // count: of the row's edges
  float weight;
  WEFT_T next_g, next_x, next_grad_s;  // a conversion at the load would wait for it: 0.9 us a row on an H200
  float sums[1 + CENTRED] = {};

  __device__ __forceinline__ Edge(const RowView& view, const WEFT_W* w, bool has_edges) : count(view.edges) {
    in_warp = PEEL && has_edges;
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
  __device__ __forceinline__ EdgeInputs loaded() const {
    if (!exists) return {};
    return {to_float(next_g), to_float(next_x), RESIDUAL ? to_float(next_grad_s) : 0.0f};
  }
  // Writes the edge's dx, and adds the edge to the sums.
  __device__ __forceinline__ void write(const EdgeInputs& in, const RowTerms& terms, WEFT_T* dx, WEFT_T* dr) {
    if (!exists) return;
    const float d = terms.gradient(in.g, in.x, weight, sums[0], sums[CENTRED]);
    const WEFT_T out = from_float<WEFT_T>(RESIDUAL ? d + in.grad_s : d);
    dx[column] = out;
    if (RESIDUAL) dr[column] = out;
  }
  // Writes the edge's sums to a partial row, as write_team_sums.
  __device__ __forceinline__ void write_sums(float* partials, index_t g_offset) const {
#pragma unroll
    for (int k = 0; k <= CENTRED; ++k)
      if (exists) partials[k * g_offset + column] = sums[k];
  }
};

// Writes dx and (RESIDUAL) dr of a thread's vector `i`, and adds it to the sums of its columns. `row` is the
// index of the first element of the thread's slice of the row, in the tensor, and `at` the vector in the
// slice.
template <typename W>
__device__ __forceinline__ void write_vector(const RowTerms& terms, const Pack& g, const Pack& x,
                                             const Pack& grad_s, const W& w, ColumnSums& sums, int i,
                                             WEFT_T* dx, WEFT_T* dr, index_t row, int at,
                                             const Dropout& dropout) {
  const index_t to = row / N + at;  // without PEEL
  Pack out;
  float ds[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float d = terms.gradient(element(g, j), element(x, j), element(w, j), sums[0][i * N + j],
                             sums[CENTRED][i * N + j]);
    // The gradient that reaches s directly is added in float32, before the only rounding.
    if (RESIDUAL) d += element(grad_s, j);
    ds[j] = d;
    out.at[j] = from_float<WEFT_T>(d);
  }
  // dr is the gradient of the residual: dropout does not apply to it, and to dx it does.
  if (RESIDUAL) (PEEL ? reinterpret_cast<Pack*>(dr + row)[at] : reinterpret_cast<Pack*>(dr)[to]) = out;
  if (WITH_DROPOUT) {
    dropout.apply(ds, to * N);
#pragma unroll
    for (int j = 0; j < N; ++j) out.at[j] = from_float<WEFT_T>(ds[j]);
  }
  (PEEL ? reinterpret_cast<Pack*>(dx + row)[at] : reinterpret_cast<Pack*>(dx)[to]) = out;
}

// A partial row begins at any float where a row has any length.
__device__ __forceinline__ void store_four(float* to, const float* four) {
  if (PEEL) {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = four[j];
  } else {
    *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
  }
}

// Writes a thread's sums from registers to the partial rows of its team, whose slice has `columns` columns
// from `partials` on. The sums of g start `g_offset` floats after those of g xhat.
__device__ __forceinline__ void write_team_sums(const ColumnSums& sums, float* partials, index_t g_offset,
                                                int columns) {
#pragma unroll
  for (int k = 0; k < (1 + CENTRED) * THREAD_COLUMNS; k += 4) {
    const float* four = &sums[k / THREAD_COLUMNS][k % THREAD_COLUMNS];
    const int e = k % THREAD_COLUMNS, at = ((int)threadIdx.x % TEAM + e / N * TEAM) * N + e % N;
    if (at >= columns) continue;
    store_four(partials + k / THREAD_COLUMNS * g_offset + at, four);
  }
}
