// The part of a row that one of LANES lanes of a warp has, for the kernels of short rows: vectors LANES
// apart, and edges (row_view.cuh). Included after norm.cuh.
#pragma once

#ifndef VECS_PER_THREAD
#define VECS_PER_THREAD 4
#endif
#ifndef LANES
#define LANES 32
#endif
static_assert(LANES <= 32 && 32 % LANES == 0, "a warp has whole rows");

// Elements past the row's end are 0.
struct LaneElements {
  Pack body[VECS_PER_THREAD];
  Edges<LANES> edges;

  __device__ __forceinline__ void load(const WEFT_T* row, const RowView& view, int first) {
    const Body<Pack> from(row + view.head);
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i)
      body[i] = load_if(first + i * LANES < view.vecs, [&] { return from[first + i * LANES]; });
    edges.load(row, view, first, 0.0f);
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
};
