// The tokens in the order of their ids, and of their places among equal ids; beside it, dpositions.
//
// A block owns every 2^bits-th row of the table, OWN at most. Its tokens lie in as many runs as
// buckets.cu had blocks, each by place; what those found of earlier owners says where its part of
// the order begins, so that no block waits for another. Each warp has a share of the runs, in
// order, and counts of its own; the counts' sums over warps and rows say where each token belongs.
// There is no atomic whose order shows, and nothing to clear. Ids that name no row have no place.
// Blocks past the owners sum positions (see embedding.cu) while the owners count.
// Bytes: from L2, eight for each run and 4 a token, twice; a few words a token and a row.
#include "order.cuh"
#include "overlap.cuh"

#ifndef PIECE
#define PIECE 16
#endif
#ifndef CHUNK
#define CHUNK PIECE
#endif
#ifndef RUNS
#define RUNS 1024  // at most
#endif
constexpr int AHEAD = 4;  // tokens of a lane that are under way together

// What a block's threads share: counts by warp and row, then where such a token of the warp's goes;
// where rows begin in the order, and in the block's pieces; where runs begin in found, and how many
// of its tokens are in runs before.
struct Shared {
  int count[ORDER_WARPS][OWN];
  int start[OWN + 1], piece[OWN + 1];
  int from[RUNS], run[RUNS + 1];
  int scratch[ORDER_WARPS];
};

// What the runs say: how many tokens are the block's, and how many are of earlier owners.
__device__ __forceinline__ int read_runs(Shared& own, const int2* heads, int runs, int& base) {
  int all = 0, below = 0, unused;
  for (int at = 0; at < runs; at += OWN) {
    const int one = at + threadIdx.x;
    const int2 head = one < runs ? heads[one] : make_int2(0, 0);
    const int earlier = before<ORDER_WARPS>(head.y, own.scratch, unused);
    if (one < runs) own.from[one] = head.x, own.run[one] = all + earlier;
    all += unused;
    below += head.x;
  }
  if (threadIdx.x == 0) own.run[runs] = all;
  before<ORDER_WARPS>(below, own.scratch, base);
  return all;
}

// The block's tokens `at`, `at` + 32, ... below `end`: rows among the block's, -1 past the end, and
// which tokens. A search for each, of which AHEAD are under way together.
__device__ __forceinline__ void its_tokens(const Shared& own, const int* found, int at, int end,
                                           int runs, index_t share, int (&row)[AHEAD],
                                           int (&token)[AHEAD]) {
  int run[AHEAD] = {};  // the last that begins at that token or before
  int step = 1;
  while (2 * step < runs) step *= 2;
  for (; step; step /= 2)
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const int next = run[u] + step;
      if (next < runs && own.run[next] <= min(at + 32 * u, end - 1)) run[u] = next;
    }
  int packed[AHEAD];
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) {
    const int within = own.from[run[u]] + min(at + 32 * u, end - 1) - own.run[run[u]];
    packed[u] = found[run[u] * share + within];
  }
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) {
    row[u] = at + 32 * u < end ? packed[u] >> OFFSET : -1;
    token[u] = (int)(run[u] * share) + (packed[u] & ((1 << OFFSET) - 1));
  }
}

// heads: (owners, runs) and found: (tokens,), `share` a run: see buckets.cu.
// from: (owners * OWN + 1,), where the tokens of each of an owner's rows begin in order: (tokens,).
// Rows that more than PIECE tokens ask for are cut into pieces of CHUNK places of the order, PIECE
// or more: pieces: (2 * tokens / PIECE + 1,), begin and end, and as many tickets a slice, zeros;
// many: (tokens / PIECE + 1,), such a row, its first piece and how many; tops: (owners,), each
// owner's first piece, how many, its first of many, how many. Each owner writes where its tokens
// begin, so that no two meet.
// grad, dpositions: see embedding.cu; a group has one place and slice, of `lead` slices.
// heads and found are not restrict: buckets.cu may still write them when this kernel begins.
extern "C" __global__ void __launch_bounds__(OWN, 32 / ORDER_WARPS)
embedding_order(const int2* heads, const int* found, const WEFT_T* __restrict__ grad,
                int* __restrict__ from, int* __restrict__ order, int4* __restrict__ tops,
                int2* __restrict__ pieces, int4* __restrict__ many, int* __restrict__ tickets,
                WEFT_T* __restrict__ dpositions, index_t runs, index_t share, index_t bits,
                index_t places, index_t lead, index_t batch, index_t length, index_t columns,
                index_t stride, index_t slices) {
  extern __shared__ int held[];
  let_next_begin();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, owners = 1 << bits;
  if (blockIdx.x >= owners) {
    const index_t task = (blockIdx.x - owners) * (OWN / LANES) + threadIdx.x / LANES;
    const index_t column = (task / places * LANES + threadIdx.x % LANES) * N;
    if (task >= places * lead || column >= columns) return;
    sum_place(grad + column, dpositions + column, task % places, (int)batch, length, columns,
              stride);
    return;
  }
  Shared& own = *reinterpret_cast<Shared*>(held);
  const index_t first = (index_t)blockIdx.x * OWN;
  const int row = threadIdx.x;
  int* count = own.count[warp];
  for (int i = lane; i < OWN; i += 32) count[i] = 0;
  wait_for_previous();
  int base;
  const int all = read_runs(own, heads + blockIdx.x * runs, (int)runs, base);
  const int each = (all + OWN - 1) / OWN * 32;
  const int begin = min(warp * each, all), end = min(begin + each, all);
  const bool once = begin + 32 * AHEAD >= end;  // then they are kept
  int its[AHEAD] = {}, token[AHEAD] = {};
  for (int at = begin; at < end; at += 32 * AHEAD) {
    its_tokens(own, found, at + lane, end, (int)runs, share, its, token);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
      if (its[u] >= 0) atomicAdd(&count[its[u]], 1);
  }
  __syncthreads();

  int whole, mine = 0;
#pragma unroll 8
  for (int w = 0; w < ORDER_WARPS; ++w) {
    const int its = own.count[w][row];
    own.count[w][row] = mine;
    mine += its;
  }
  const int start = base + before<ORDER_WARPS>(mine, own.scratch, whole);
#pragma unroll 8
  for (int w = 0; w < ORDER_WARPS; ++w) own.count[w][row] += start;
  const int cut = mine > PIECE ? (mine + CHUNK - 1) / CHUNK : 0;
  int parts = 0, long_rows = 0, part = 0, nth = 0;
  if (__syncthreads_or(cut)) {
    part = before<ORDER_WARPS>(cut, own.scratch, parts);
    nth = before<ORDER_WARPS>(cut > 0, own.scratch, long_rows);
  }
  const int slot0 = (int)(2 * (index_t)base / PIECE), many0 = base / PIECE;
  from[first + row] = own.start[row] = start;
  own.piece[row] = part;
  if (cut) many[many0 + nth] = make_int4((row << bits) + (int)blockIdx.x, slot0 + part, cut, 0);
  if (row == 0) {
    tops[blockIdx.x] = make_int4(slot0, parts, many0, long_rows);
    own.start[OWN] = base + all, own.piece[OWN] = parts;
    if (blockIdx.x == owners - 1) from[first + OWN] = base + all;
  }
  __syncthreads();

  for (int p = threadIdx.x; p < parts; p += OWN) {
    int low = 0, high = OWN;  // the last row whose pieces begin at p or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (own.piece[middle] <= p ? low : high) = middle;
    }
    const int at = own.start[low] + (p - own.piece[low]) * CHUNK;
    pieces[slot0 + p] = make_int2(at, min(at + CHUNK, own.start[low + 1]));
    for (index_t s = 0; s < slices; ++s) tickets[(slot0 + p) * slices + s] = 0;
  }
  for (int at = begin; at < end; at += 32 * AHEAD) {
    if (!once) its_tokens(own, found, at + lane, end, (int)runs, share, its, token);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) put(order, count, its[u], token[u]);
  }
}
