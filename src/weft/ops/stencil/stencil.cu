// Five-point stencil, and its two gradients in one pass.
//
// A warp marches down a strip of 32 * VEC columns. Each thread has VEC neighbouring columns, one access a row
// (16 bytes where all rows are aligned to them), and keeps three rows in registers: every cell is loaded once
// by its own thread, but for the two rows at the ends of a piece. West and east neighbours come from the next
// lanes by shuffles; at the ends of a strip they are loads of one cell.
// Bytes: n read, n written forward; 2n read, n written backward.
#include "reduce.cuh"
#include "two_sum.cuh"
#include "words.cuh"

#ifndef VEC
#define VEC 4
#endif
#ifndef THREADS
#define THREADS 128
#endif

constexpr int UNROLL = 4;  // rows whose loads are in flight together
constexpr unsigned ALL = 0xffffffffu;
using Pack = Words<WEFT_T, VEC>;

// One thread's cells of a grid: VEC columns of a piece of rows, which are counted from the piece's first.
struct Cells {
  const WEFT_T* at;
  index_t stride;
  int first, last;  // rows that exist: from -1, the row before the piece, or 0; last is excluded
  bool inside, west, east;  // whether the columns exist, and a column before and after them

  __device__ __forceinline__ Cells(const WEFT_T* grid, index_t stride, index_t row, index_t rows,
                                   index_t column, index_t columns, index_t piece_rows)
      : at(grid + row * stride + column),
        stride(stride),
        first(row > 0 ? -1 : 0),
        last((int)min(rows - row, piece_rows + 1)),
        inside(column < columns),
        west(column > 0),
        east(column + VEC < columns) {}
  __device__ __forceinline__ bool exists(int i) const { return i >= first && i < last; }
};

// A row of the strip in a thread: its own cells, and in lane 0 and 31 the cell beside the strip.
struct Row { Pack own; float side; };

__device__ __forceinline__ Pack load_pack(const Cells& g, int i) {
  if (g.inside && g.exists(i)) return load_words<WEFT_T, VEC>(g.at + i * g.stride);
  return no_words<WEFT_T, VEC>();
}

__device__ __forceinline__ Row load_row(const Cells& g, int i) {
  Row row = {load_pack(g, i), 0.0f};
  const int lane = threadIdx.x % 32;
  if (((lane == 0 && g.west) || (lane == 31 && g.east)) && g.exists(i))
    row.side = to_float(g.at[i * g.stride + (lane ? VEC : -1)]);
  return row;
}

// The five terms of a cell, in the order of the coefficients.
struct Terms { float at[5]; };

// Sets the cells beside a thread's first and last one, of which the strip's ends have `side`. All lanes of
// the warp take part.
__device__ __forceinline__ void look_aside(float& west, float& east, float first, float last, float side) {
  const int lane = threadIdx.x % 32;
  west = __shfl_sync(ALL, last, (lane + 31) % 32);
  east = __shfl_sync(ALL, first, (lane + 1) % 32);
  if (lane == 0) west = side;
  if (lane == 31) east = side;
}

// Returns the terms of a thread's cells in a row. All lanes of the warp take part.
__device__ __forceinline__ void gather(Terms (&cells)[VEC], const Pack& north, const Row& row,
                                       const Pack& south) {
  float west, east;
  look_aside(west, east, element(row.own, 0), element(row.own, VEC - 1), row.side);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    cells[j].at[0] = element(row.own, j);
    cells[j].at[1] = element(north, j);
    cells[j].at[2] = element(south, j);
    cells[j].at[3] = j ? element(row.own, j > 0 ? j - 1 : 0) : west;
    cells[j].at[4] = j + 1 < VEC ? element(row.own, j + 1 < VEC ? j + 1 : 0) : east;
  }
}

// True if a cell has neighbour k. VEC divides the columns: only a vector's ends can be at the grid's.
__device__ __forceinline__ bool has(int k, const Cells& g, int i, int j) {
  if (k == 1) return g.exists(i - 1);
  if (k == 2) return g.exists(i + 1);
  if (k == 3) return j > 0 || g.west;
  if (k == 4) return j + 1 < VEC || g.east;
  return true;
}

// Which piece of which strip a warp has: `pieces` of piece_rows rows each, `strips` of 32 * VEC columns.
struct Place {
  index_t batch, row, column;
  int count;  // rows of the piece
  __device__ __forceinline__ Place(index_t item, index_t rows, index_t strips, index_t pieces,
                                   index_t piece_rows) {
    // Neighbouring warps have neighbouring strips, and share the lines at the strips' ends.
    column = (item % strips * 32 + threadIdx.x % 32) * VEC;
    row = item / strips % pieces * piece_rows;
    count = (int)min(piece_rows, rows - row);
    batch = item / strips / pieces;
  }
};

__device__ __forceinline__ void unpack(float (&cells)[VEC], const Pack& pack) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) cells[j] = element(pack, j);
}

// The stencil of a piece whose cells have all their neighbours, and whose rows are a multiple of UNROLL. It
// does two things that the loop for pieces at a grid's border leaves out. A row's pack is loaded again, with
// the row UNROLL further down, as soon as its cells are unpacked: loads are always in flight, and not only
// while the warp waits for all of them. And a row is unpacked once for its three uses.
__device__ __forceinline__ void march_inside(const Cells& g, const float (&w)[5], WEFT_T* target,
                                             index_t columns, int count) {
  const int lane = threadIdx.x % 32, beside = lane ? VEC : -1;
  const bool is_end = lane == 0 || lane == 31;
  float north[VEC], own[VEC], side = is_end ? to_float(g.at[beside]) : 0.0f;
  unpack(north, load_words<WEFT_T, VEC>(g.at - g.stride));
  unpack(own, load_words<WEFT_T, VEC>(g.at));
  const WEFT_T* from = g.at + g.stride;
  Pack packs[UNROLL];
  WEFT_T sides[UNROLL] = {};
#pragma unroll
  for (int u = 0; u < UNROLL; ++u, from += g.stride) {
    packs[u] = load_words<WEFT_T, VEC>(from);
    if (is_end) sides[u] = from[beside];
  }
#pragma unroll 1
  for (int left = count - UNROLL; left >= 0; left -= UNROLL) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u, from += g.stride, target += columns) {
      float south[VEC], out[VEC], west, east;
      unpack(south, packs[u]);
      const float south_side = to_float(sides[u]);
      if (left > 0) packs[u] = load_words<WEFT_T, VEC>(from);
      if (left > 0 && is_end) sides[u] = from[beside];
      look_aside(west, east, own[0], own[VEC - 1], side);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        out[j] = fmaf(w[1], north[j], w[0] * own[j]);
        out[j] = fmaf(w[2], south[j], out[j]);
        out[j] = fmaf(w[3], j ? own[j ? j - 1 : 0] : west, out[j]);
        out[j] = fmaf(w[4], j + 1 < VEC ? own[j + 1 < VEC ? j + 1 : 0] : east, out[j]);
      }
      store_words(target, to_words<WEFT_T, VEC>(out));
#pragma unroll
      for (int j = 0; j < VEC; ++j) north[j] = own[j], own[j] = south[j];
      side = south_side;
    }
  }
}

// x: (batches, rows, columns), grids at batch_stride and rows at row_stride elements; weights: (5,); y:
// (batches, rows, columns) contiguous. A warp for each of the items.
extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
stencil(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ weights, WEFT_T* __restrict__ y,
        index_t items, index_t rows, index_t columns, index_t batch_stride, index_t row_stride,
        index_t strips, index_t pieces, index_t piece_rows) {
  const index_t item = (index_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (item >= items) return;
  const Place place(item, rows, strips, pieces, piece_rows);
  const Cells g(x + place.batch * batch_stride, row_stride, place.row, rows, place.column, columns,
                piece_rows);
  WEFT_T* target = y + (place.batch * rows + place.row) * columns + place.column;
  float w[5];
#pragma unroll
  for (int k = 0; k < 5; ++k) w[k] = to_float(weights[k]);
  const index_t strip = place.column - threadIdx.x % 32 * VEC;
  if (place.row > 0 && place.row + place.count < rows && place.count % UNROLL == 0 && strip > 0 &&
      strip + 32 * VEC < columns)
    return march_inside(g, w, target, columns, place.count);
  Pack north = load_pack(g, -1);
  Row row = load_row(g, 0);
  for (int start = 0; start < place.count; start += UNROLL) {
    Row next[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) next[u] = load_row(g, start + u < place.count ? start + u + 1 : -2);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int i = start + u;
      Terms cells[VEC];
      gather(cells, north, row, next[u].own);
      float out[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        float sum = w[0] * cells[j].at[0];
#pragma unroll
        for (int k = 1; k < 5; ++k) sum = fmaf(has(k, g, i, j) ? w[k] : 0.0f, cells[j].at[k], sum);
        out[j] = sum;
      }
      if (g.inside && i < place.count) store_words(target + i * columns, to_words<WEFT_T, VEC>(out));
      north = row.own;
      row = next[u];
    }
  }
}

// grad, x: (batches, rows, columns), each with strides of its own; weights: (5,); dx: (batches, rows,
// columns) contiguous; parts: (5, items) float32, the coefficients' gradients of each warp's cells.
//
// A cell's gradient is the stencil of `grad` with opposite neighbours exchanged. A coefficient's is the sum
// of x times the neighbour of `grad` on the opposite side: x at the cell alone is loaded.
extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
stencil_backward(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ x,
                 const WEFT_T* __restrict__ weights, WEFT_T* __restrict__ dx, float* __restrict__ parts,
                 index_t items, index_t rows, index_t columns, index_t grad_batch_stride,
                 index_t grad_row_stride, index_t x_batch_stride, index_t x_row_stride, index_t strips,
                 index_t pieces, index_t piece_rows) {
  constexpr int OPPOSITE[5] = {0, 2, 1, 4, 3};
  const index_t item = (index_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (item >= items) return;
  const Place place(item, rows, strips, pieces, piece_rows);
  const Cells g(grad + place.batch * grad_batch_stride, grad_row_stride, place.row, rows, place.column,
                columns, piece_rows);
  const Cells gx(x + place.batch * x_batch_stride, x_row_stride, place.row, rows, place.column, columns,
                 piece_rows);
  WEFT_T* target = dx + (place.batch * rows + place.row) * columns + place.column;
  float w[5];
#pragma unroll
  for (int k = 0; k < 5; ++k) w[k] = to_float(weights[OPPOSITE[k]]);
  TwoSum sums[5];
  Pack north = load_pack(g, -1);
  Row row = load_row(g, 0);
  for (int start = 0; start < place.count; start += UNROLL) {
    Row next[UNROLL];
    Pack own[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const bool is_row = start + u < place.count;
      next[u] = load_row(g, is_row ? start + u + 1 : -2);
      own[u] = load_pack(gx, is_row ? start + u : -2);  // zeros of rows beyond the piece add nothing
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int i = start + u;
      if (i >= place.count) break;  // all lanes alike
      Terms cells[VEC];
      gather(cells, north, row, next[u].own);
      float out[VEC];
      float terms[5] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        float sum = w[0] * cells[j].at[0];
#pragma unroll
        for (int k = 0; k < 5; ++k) {
          const bool is_there = g.inside && has(k, g, i, j);
          if (k) sum = fmaf(is_there ? w[k] : 0.0f, cells[j].at[k], sum);
          // A NaN of x whose neighbour is outside the grid is in no term.
          terms[k] = fmaf(is_there ? element(own[u], j) : 0.0f, cells[j].at[k], terms[k]);
        }
        out[j] = sum;
      }
#pragma unroll
      for (int k = 0; k < 5; ++k) sums[k].add(terms[k]);
      if (g.inside) store_words(target + i * columns, to_words<WEFT_T, VEC>(out));
      north = row.own;
      row = next[u];
    }
  }
#pragma unroll
  for (int k = 0; k < 5; ++k) {
    const float total = warp_sum(sums[k].value());
    if (threadIdx.x % 32 == 0) parts[OPPOSITE[k] * items + item] = total;
  }
}

// parts: (5, items) float32; dweights: (5,). A block adds one coefficient's parts, in an order that follows
// from their number alone.
extern "C" __global__ void __launch_bounds__(1024)
stencil_weights(const float* __restrict__ parts, WEFT_T* __restrict__ dweights, index_t items) {
  __shared__ float scratch[32];
  TwoSum sum;
  for (index_t k = threadIdx.x; k < items; k += blockDim.x) sum.add(parts[blockIdx.x * items + k]);
  const float total = block_sum(sum.value(), scratch);
  if (threadIdx.x == 0) dweights[blockIdx.x] = from_float<WEFT_T>(total);
}
