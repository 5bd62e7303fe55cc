// y = x w (+ bias) for few rows of x (at most TOKENS), by tensor cores through mma.sync; sums in float32.
//
// Such a product takes as long as reading w once. The weight is therefore the factor with 16 rows of mma's
// m16n8k16 (16 columns of y), and the rows of x are its 8 columns: 8 or 16 rows cost as much as one. A block
// computes BN columns of y at a time, for all rows; tiles of w and x come through a ring of STAGES buffers
// by asynchronous copies (operand_tile.cuh).
//
// The work is the tiles of w, BN columns by BK of K, in one sequence: along K, then the next columns. Each
// block takes an equal stretch of it ("stream-K", Osama et al., arXiv:2301.03598), so that every SM reads as
// much of w as any other, and the ring stays full from one group of columns to the next. Where a stretch
// begins or ends within a group of columns, the block writes its partial sums, and a second kernel adds them
// in the order of K. The stretches depend on w's shape and the number of blocks alone: the bits of a row
// do not depend on the other rows or on their number.
#define OVERLAP 1
#include "operand_tile.cuh"
#include "overlap.cuh"

#ifndef TOKENS
#define TOKENS 16
#define STAGES 5
#define X_MODE 0
#define W_MODE 0
#endif

namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS, BN = 128, WN = BN / WARPS;
constexpr int MT = WN / 16, NT = TOKENS / 8;  // products of a warp: MT x NT, each of 16 columns x 8 rows
constexpr int PARTIALS = BN * 8;              // sums of one block for one group of columns and 8 rows
using TileX = Tile<X_MODE, TOKENS, THREADS, true>;
using TileW = Tile<W_MODE, BN, THREADS>;
constexpr int STAGE_BYTES = TileX::BYTES + TileW::BYTES;
static_assert(sizeof(T) == 2 && TOKENS % 16 == 0 && MT == 2, "half types; pairs of fragments");

// Stretches of the sequence of `units` tiles for `blocks` blocks.
struct Stretches {
  long long units, blocks;

  __device__ __forceinline__ int first(int block) const { return (int)(block * units / blocks); }
  __device__ __forceinline__ int owner(int unit) const {  // the block whose stretch has the unit
    return (int)(((unit + 1) * blocks - 1) / units);
  }
};

// Blocks and groups of columns are visited along a staircase: this numbers its steps.
__device__ __forceinline__ index_t slot(int block, int group) { return block + group; }

// Rounds and stores four sums: columns `column` and `column` + 8 of rows `row` and `row` + 1.
__device__ __forceinline__ void store(const float (&sums)[4], T* y, const T* bias, index_t row,
                                      index_t column, index_t m, index_t n) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const index_t r = row + i % 2, c = column + i / 2 * 8;
    if (r < m && c < n) y[r * n + c] = from_float<T>(bias ? sums[i] + to_float(bias[c]) : sums[i]);
  }
}

// The first row of 8, and the first column of BN, of the four sums of a lane in product `part` of a warp.
__device__ __forceinline__ int lane_row(int lane) { return lane % 4 * 2; }
__device__ __forceinline__ int lane_column(int warp, int part, int lane) {
  return warp * WN + part * 16 + lane / 4;
}

}  // namespace

// x: (M, K) and w: (K, N) by strides in elements; y: (M, N) contiguous; bias: (N) or null. M <= TOKENS; M, N,
// K > 0. partials: (blocks + groups of columns) x ceil(M / 8) x PARTIALS float32, of which the second kernel
// reads what was written. Dynamic shared memory: STAGES * STAGE_BYTES.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul_skinny(const T* x, const T* w, const T* bias, T* y, float* partials, index_t m, index_t n, index_t k,
              index_t x_row, index_t x_column, index_t w_row, index_t w_column) {
  extern __shared__ __align__(128) unsigned char pool[];
  launch_dependents();  // the second kernel's blocks wait beside these, and start as soon as they have ended
  const unsigned shared = shared_address(pool);
  const int groups = (int)((n + BN - 1) / BN), steps = (int)((k + BK - 1) / BK);
  const Stretches stretches{(long long)groups * steps, gridDim.x};
  const int first = stretches.first(blockIdx.x), end = stretches.first(blockIdx.x + 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // The tiles that are copied next, and their place in the sequence.
  TileX tile_x(x, 0, m, x_row, x_column, 0);
  TileW tile_w(w, 0, n, w_column, w_row, 0);
  int fetched = first, fetch_group = first / steps, fetch_step = first % steps;
  bool begins = true;  // a group of columns, or the stretch
  auto fetch = [&](int stage) {
    if (fetched < end) {
      if (begins) {
        const index_t at = (index_t)fetch_step * BK;
        tile_x = TileX(x + at * x_column, 0, m, x_row, x_column, k - at);
        tile_w = TileW(w + at * w_row, (index_t)fetch_group * BN, n, w_column, w_row, k - at);
      }
      tile_w.next(shared + stage * STAGE_BYTES + TileX::BYTES);
      tile_x.next(shared + stage * STAGE_BYTES);
      ++fetched;
      begins = ++fetch_step == steps;
      if (begins) fetch_step = 0, ++fetch_group;
    }
    copies_commit();  // also an empty group, so that copies_wait counts right at the end
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(s);

  int stage = 0;
  for (int unit = first, group = first / steps; unit < end; ++group) {
    const int group_first = group * steps, group_end = min(end, group_first + steps);
    const bool whole = unit == group_first && group_end == group_first + steps;
    float sums[MT][NT][4] = {};
    for (; unit < group_end; ++unit) {
      copies_wait<STAGES - 2>();
      __syncthreads();  // this stage has come for all threads, and all have read the one before it
      fetch(stage == 0 ? STAGES - 1 : stage - 1);
      const unsigned x_at = shared + stage * STAGE_BYTES, w_at = x_at + TileX::BYTES;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        unsigned fw[MT][4], fx[NT / 2][4];
#pragma unroll
        for (int a = 0; a < MT; ++a) fragment<true, TileW>(fw[a], w_at, warp * WN + a * 16, step);
#pragma unroll
        for (int b = 0; b < NT / 2; ++b) fragment<false, TileX>(fx[b], x_at, b * 16, step);
#pragma unroll
        for (int a = 0; a < MT; ++a)
#pragma unroll
          for (int b = 0; b < NT; ++b)
            multiply<T>(sums[a][b], fw[a], fx[b / 2][b % 2 * 2], fx[b / 2][b % 2 * 2 + 1]);
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    const int row_groups = (int)((m + 7) / 8);
    float* const out = partials + slot(blockIdx.x, group) * row_groups * PARTIALS;
#pragma unroll
    for (int b = 0; b < NT; ++b) {
      if (b >= row_groups) break;
#pragma unroll
      for (int a = 0; a < MT; ++a) {
        if (whole) {
          const index_t column = (index_t)group * BN + lane_column(warp, a, lane);
          store(sums[a][b], y, bias, b * 8 + lane_row(lane), column, m, n);
        } else {  // in the order of threads, 16 bytes each
          Vector<float, 4> part;
          memcpy(part.at, sums[a][b], sizeof part);
          *reinterpret_cast<Vector<float, 4>*>(out + b * PARTIALS + (a * THREADS + threadIdx.x) * 4) = part;
        }
      }
    }
  }
}

// Adds the partial sums of the groups of columns that several of `blocks` blocks share. Block (group, 8 rows)
// with MT * THREADS threads.
extern "C" __global__ void __launch_bounds__(MT * THREADS)
matmul_skinny_sum(const float* partials, const T* bias, T* y, index_t m, index_t n, index_t k,
                  index_t blocks) {
  wait_for_previous_kernel();
  const int groups = (int)((n + BN - 1) / BN), steps = (int)((k + BK - 1) / BK);
  const Stretches stretches{(long long)groups * steps, blocks};
  const int group = blockIdx.x, row_groups = (int)((m + 7) / 8);
  const int from = stretches.owner(group * steps), to = stretches.owner(group * steps + steps - 1);
  if (from == to) return;  // its block had all of K, and has stored the result
  const float* at = partials + (slot(from, group) * row_groups + blockIdx.y) * PARTIALS + threadIdx.x * 4;
  float sums[4] = {};
#pragma unroll 4
  for (int block = from; block <= to; ++block, at += row_groups * PARTIALS) {
    const Vector<float, 4> part = *reinterpret_cast<const Vector<float, 4>*>(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += part.at[i];
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x % THREADS / 32, part = threadIdx.x / THREADS;
  const index_t row = (index_t)blockIdx.y * 8 + lane_row(lane);
  store(sums, y, bias, row, (index_t)group * BN + lane_column(warp, part, lane), m, n);
}
