// The sum of each segment of rows: values (rows, n), segment s from offsets[s] to offsets[s + 1].
//
// sum_segments: a group of lanes for each segment of each row. A segment of more than a few rounds of its
// group is summed by the whole warp, and one longer than a tile is left to the other kernels. sum_tiles: a
// block for the pieces of long segments in a tile of TILE elements. sum_pieces: a block for each long
// segment.
//
// A tile has at most two such pieces: of the segment that began before it, and of the one that begins in it
// and goes on behind it. So each piece has a place that no other has, and no order depends on when a block
// runs. Bytes: n elements and the offsets read, the sums written; for each tile two numbers of segments.
#include "numeric.cuh"
#include "reduce.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef TILE
#define TILE 16384
#endif

constexpr int VEC = 16 / sizeof(WEFT_T), UNROLL = 4, WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr index_t ROUNDS = 4;  // of a group, up to which it sums a segment alone
using Pack = Vector<WEFT_T, VEC>;

// An offset that is out of range, which no one checks on a GPU, must be no address.
__device__ __forceinline__ index_t clamp(index_t v, index_t low, index_t high) {
  return v < low ? low : v > high ? high : v;
}

__device__ __forceinline__ float sum_of(const Pack& pack) {
  float v[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) v[j] = element(pack, j);
#pragma unroll
  for (int half = VEC / 2; half > 0; half /= 2)
#pragma unroll
    for (int j = 0; j < half; ++j) v[j] += v[j + half];
  return v[0];
}

// Returns the sum of elements begin to end of a row, of which the thread takes every `threads`-th vector.
__device__ __forceinline__ float sum_between(const WEFT_T* __restrict__ row, index_t begin, index_t end,
                                             int thread, int threads) {
  const WEFT_T* first = row + begin;
  const index_t count = end - begin;
  // Vectors begin at the next multiple of 16 bytes.
  const index_t before = ((16 - (reinterpret_cast<size_t>(first) & 15)) & 15) / sizeof(WEFT_T);
  const index_t head = before < count ? before : count, vectors = (count - head) / VEC;
  float sum = 0.0f;
#pragma unroll 1
  for (index_t i = thread; i < head; i += threads) sum += to_float(first[i]);
  const Pack* wide = reinterpret_cast<const Pack*>(first + head);
#pragma unroll 1
  for (index_t at = thread; at < vectors; at += UNROLL * (index_t)threads) {
    Pack packs[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (at + u * (index_t)threads < vectors) packs[u] = wide[at + u * (index_t)threads];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (at + u * (index_t)threads < vectors) sum += sum_of(packs[u]);
  }
#pragma unroll 1
  for (index_t i = head + vectors * VEC + thread; i < count; i += threads) sum += to_float(first[i]);
  return sum;
}

__device__ __forceinline__ index_t from_lane(index_t v, int lane) {
  const unsigned low = __shfl_sync(ALL, (unsigned)v, lane);
  const unsigned high = __shfl_sync(ALL, (unsigned)((unsigned long long)v >> 32), lane);
  return (index_t)((unsigned long long)high << 32 | low);
}

// values: (rows, n), rows at `stride` elements; offsets: (segments + 1,); y: (rows, segments). heads, tails:
// (tiles,), all -1 before the launch: the long segment that has the tile's first element but began before it,
// and the one that begins in the tile. A segment has `lanes` neighbouring lanes, a power of two up to 32.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_segments(const WEFT_T* __restrict__ values, const index_t* __restrict__ offsets, WEFT_T* __restrict__ y,
             index_t* __restrict__ heads, index_t* __restrict__ tails, index_t rows, index_t segments,
             index_t n, index_t stride, index_t lanes) {
  const int group = (int)lanes, lane = threadIdx.x & (group - 1);
  const index_t number = (index_t)blockIdx.x * (THREADS / group) + threadIdx.x / group;
  // A group without a segment goes on with none: the shuffles name all lanes of its warp.
  const bool has_segment = number < rows * segments;
  // A division of 64 bits costs a short segment more than its additions, and one row needs none.
  const index_t row = has_segment && rows > 1 ? number / segments : 0;
  const index_t segment = has_segment ? number - row * segments : 0;
  const index_t begin = has_segment ? clamp(offsets[segment], 0, n) : 0;
  const index_t end = has_segment ? clamp(offsets[segment + 1], begin, n) : 0;
  const bool is_long = end - begin > TILE;
  const bool is_shared = !is_long && group < 32 && end - begin > ROUNDS * UNROLL * VEC * lanes;
  float sum = is_long || is_shared ? 0.0f : sum_between(values + row * stride, begin, end, lane, group);
  for (int step = group / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
  unsigned shared = __ballot_sync(ALL, is_shared && lane == 0);
  while (shared) {
    const int from = __ffs(shared) - 1;
    shared &= shared - 1;
    const index_t its_row = from_lane(row, from), its_begin = from_lane(begin, from);
    const index_t its_end = from_lane(end, from);
    const float part = sum_between(values + its_row * stride, its_begin, its_end, (int)threadIdx.x % 32, 32);
    const float total = warp_sum(part);
    if ((int)threadIdx.x % 32 == from) sum = total;
  }
  if (!has_segment) return;
  if (!is_long) {
    if (lane == 0) y[number] = from_float<WEFT_T>(sum);
  } else if (row == 0) {  // the other rows have the same segments
    const index_t first = begin / TILE, last = (end - 1) / TILE;
    if (lane == 0) tails[first] = segment;
    for (index_t tile = first + 1 + lane; tile <= last; tile += group) heads[tile] = segment;
  }
}

// Calls work(row, tile) for each tile of which is_due(tile) is true, as `count` tiles of rows are distributed
// over the blocks. A warp asks for 32 tiles at once: most of them may have nothing to do.
template <typename Ask, typename Work>
__device__ __forceinline__ void for_each_tile(index_t count, index_t tiles, Ask is_due, Work work) {
  for (index_t first = blockIdx.x; first < count; first += 32 * (index_t)gridDim.x) {
    const index_t own = first + threadIdx.x % 32 * (index_t)gridDim.x;
    unsigned due = __ballot_sync(ALL, own < count && is_due(own % tiles));
    for (; due; due &= due - 1) {
      const index_t at = first + (__ffs(due) - 1) * (index_t)gridDim.x;
      work(at / tiles, at % tiles);
    }
  }
}

// As above; pieces: (rows, tiles, 2), the sums of a tile's part of its heads' and of its tails' segment.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_tiles(const WEFT_T* __restrict__ values, const index_t* __restrict__ offsets,
          const index_t* __restrict__ heads, const index_t* __restrict__ tails, float* __restrict__ pieces,
          index_t rows, index_t n, index_t stride, index_t tiles) {
  __shared__ float scratch[2][32];
  const auto is_due = [&](index_t tile) { return heads[tile] >= 0 || tails[tile] >= 0; };
  for_each_tile(rows * tiles, tiles, is_due, [&](index_t row, index_t tile) {
    const index_t start = tile * TILE, stop = start + TILE < n ? start + TILE : n;
    const WEFT_T* its_row = values + row * stride;
    float head = 0.0f, tail = 0.0f;
    if (heads[tile] >= 0) {
      const index_t end = clamp(offsets[heads[tile] + 1], start, stop);
      head = sum_between(its_row, start, end, (int)threadIdx.x, THREADS);
    }
    if (tails[tile] >= 0) {
      const index_t begin = clamp(offsets[tails[tile]], start, stop);
      tail = sum_between(its_row, begin, stop, (int)threadIdx.x, THREADS);
    }
    head = block_sum(head, scratch[0]);
    tail = block_sum(tail, scratch[1]);
    if (threadIdx.x == 0) {
      pieces[2 * (row * tiles + tile)] = head;
      pieces[2 * (row * tiles + tile) + 1] = tail;
    }
    __syncthreads();  // before the next tile writes to scratch
  });
}

// As above: adds the pieces of each segment that begins in a tile and goes on behind it.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_pieces(const index_t* __restrict__ offsets, const index_t* __restrict__ tails,
           const float* __restrict__ pieces, WEFT_T* __restrict__ y, index_t rows, index_t segments,
           index_t n, index_t tiles) {
  __shared__ float scratch[32];
  const auto is_due = [&](index_t tile) { return tails[tile] >= 0; };
  for_each_tile(rows * tiles, tiles, is_due, [&](index_t row, index_t tile) {
    const float* own = pieces + 2 * row * tiles;
    const index_t last = (clamp(offsets[tails[tile] + 1], 1, n) - 1) / TILE;
    float sum = 0.0f;
#pragma unroll 4
    for (index_t t = tile + 1 + threadIdx.x; t <= last; t += THREADS) sum += own[2 * t];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) y[row * segments + tails[tile]] = from_float<WEFT_T>(own[2 * tile + 1] + sum);
    __syncthreads();  // before the next segment writes to scratch
  });
}
