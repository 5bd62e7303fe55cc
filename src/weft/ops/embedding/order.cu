// The tokens in the order of their ids, and of their places among equal ids; beside it, dpositions.
//
// A block owns OWN rows of the table and reads all ids: those below its rows say where its part of
// the order begins, so that no block waits for another. Each warp has a share of the ids, in order,
// and counts of its own; the counts' sums over warps and rows say where each token belongs. There
// is no atomic whose order shows, and nothing to clear. Ids that name no row have no place.
// Blocks past the owners sum positions (see embedding.cu) while the owners count.
// Bytes: the ids from L2, 8 a token and owner; a few words a token and a row.
#include "rows.cuh"

#ifndef PIECE
#define PIECE 16
#endif
#ifndef OWNERS
#define OWNERS 16
#endif
constexpr int ORDER_WARPS = OWNERS, OWN = ORDER_WARPS * 32;
constexpr int LIST = 128;   // tokens that a warp remembers; if it finds more, it looks again
constexpr int AHEAD = ORDER_WARPS > 16 ? 8 : 16;  // ids of a lane that are under way together
constexpr int OFFSET = 22;  // bits of a token's place in its warp's share, in such a memory

// Exclusive sum over the block's threads; `whole` gets the block's total.
__device__ __forceinline__ int before(int mine, int* scratch, int& whole) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  int sums = lane < ORDER_WARPS ? scratch[lane] : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, sums, step);
    if (lane >= step) sums += other;
  }
  whole = __shfl_sync(ALL, sums, 31);
  const int earlier = __shfl_sync(ALL, sums, warp ? warp - 1 : 0);
  __syncthreads();
  return (warp ? earlier : 0) + upto - mine;
}

// What a block's threads share: counts by warp and row, then how many such tokens the warps before
// have; the tokens each warp found; where rows begin in the order, and in the block's pieces.
struct Shared {
  int count[ORDER_WARPS][OWN];
  int list[ORDER_WARPS][LIST];
  int start[OWN + 1], piece[OWN + 1];
  int scratch[ORDER_WARPS];
};

// AHEAD ids of each lane from token `at` on, -1 past the end.
__device__ __forceinline__ void read(index_t (&id)[AHEAD], const index_t* ids, index_t at,
                                     index_t end) {
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) {
    const index_t token = at + u * 32 + threadIdx.x % 32;
    id[u] = token < end ? ids[token] : -1;
  }
}

// The order gets up to 32 tokens of a warp, one a lane, each of a row or of none (-1).
__device__ __forceinline__ void put(int* order, const int* start, int* count, int row, int token) {
  const unsigned equal = __match_any_sync(ALL, row);
  const int rank = __popc(equal & ((1u << threadIdx.x % 32) - 1));
  const int at = row < 0 ? 0 : count[row];
  __syncwarp();
  if (row >= 0 && rank == 0) count[row] = at + __popc(equal);
  __syncwarp();
  if (row >= 0) order[start[row] + at + rank] = token;
}

// ids: (tokens,). from: (vocabulary + 1,), where each row's tokens begin in order: (tokens,).
// Rows that more than PIECE tokens ask for are cut into pieces of PIECE places of the order:
// pieces: (2 * tokens / PIECE + 1,), begin and end; many: (tokens / PIECE + 1,), such a row, its
// first piece and how many; heads: (owners,), each owner's first piece, how many, its first of
// many, how many. Each owner writes where its tokens begin, so that no two meet.
// grad, dpositions: see embedding.cu; a warp has one place and slice, of `lead` slices.
extern "C" __global__ void __launch_bounds__(OWN, 32 / ORDER_WARPS)
embedding_order(const index_t* __restrict__ ids, const WEFT_T* __restrict__ grad,
                int* __restrict__ from, int* __restrict__ order, int4* __restrict__ heads,
                int2* __restrict__ pieces, int4* __restrict__ many,
                WEFT_T* __restrict__ dpositions, index_t tokens, index_t vocabulary,
                index_t owners, index_t places, index_t lead, index_t batch, index_t length,
                index_t columns, index_t stride) {
  extern __shared__ int held[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (blockIdx.x >= owners) {
    const index_t task = (blockIdx.x - owners) * ORDER_WARPS + warp;
    const index_t column = (task / places * 32 + lane) * N;
    if (task >= places * lead || column >= columns) return;
    sum_place(grad + column, dpositions + column, task % places, (int)batch, length, columns,
              stride);
    return;
  }
  Shared& own = *reinterpret_cast<Shared*>(held);
  const index_t first = (index_t)blockIdx.x * OWN;
  const int rows = (int)min((index_t)OWN, vocabulary - first), row = threadIdx.x;
  const index_t share = (tokens + OWN - 1) / OWN * 32;
  const index_t begin = min(warp * share, tokens), end = min(begin + share, tokens);
  int *count = own.count[warp], *list = own.list[warp];
  for (int i = lane; i < OWN; i += 32) count[i] = 0;
  __syncwarp();

  int below = 0, found = 0;
  for (index_t at = begin; at < end; at += 32 * AHEAD) {
    index_t id[AHEAD];
    read(id, ids, at, end);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const index_t of = id[u] - first;
      const bool mine = of >= 0 && of < rows;
      below += id[u] >= 0 && of < 0;
      const unsigned here = __ballot_sync(ALL, mine);
      if (here == 0) continue;
      const int slot = found + __popc(here & ((1u << lane) - 1));
      if (mine) {
        atomicAdd(&count[of], 1);
        if (slot < LIST) list[slot] = (int)of << OFFSET | (int)(at + u * 32 + lane - begin);
      }
      found += __popc(here);
    }
  }

  int base, whole, mine = 0;
  before(below, own.scratch, base);  // and all counts are there
  if (row < rows)
    for (int w = 0; w < ORDER_WARPS; ++w) {
      const int its = own.count[w][row];
      own.count[w][row] = mine;
      mine += its;
    }
  const int start = base + before(mine, own.scratch, whole);
  const int cut = mine > PIECE ? (mine + PIECE - 1) / PIECE : 0;
  int parts, long_rows;
  const int part = before(cut, own.scratch, parts);
  const int nth = before(cut > 0, own.scratch, long_rows);
  const int slot0 = (int)(2 * (index_t)base / PIECE), many0 = base / PIECE;
  if (row < rows) {
    from[first + row] = own.start[row] = start;
    own.piece[row] = part;
    if (cut) many[many0 + nth] = make_int4((int)first + row, slot0 + part, cut, 0);
  }
  if (row == 0) {
    heads[blockIdx.x] = make_int4(slot0, parts, many0, long_rows);
    own.start[rows] = base + whole, own.piece[rows] = parts;
    if (blockIdx.x == owners - 1) from[vocabulary] = base + whole;
  }
  __syncthreads();

  for (int p = threadIdx.x; p < parts; p += OWN) {
    int low = 0, high = rows;  // the last row whose pieces begin at p or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (own.piece[middle] <= p ? low : high) = middle;
    }
    const int at = own.start[low] + (p - own.piece[low]) * PIECE;
    pieces[slot0 + p] = make_int2(at, min(at + PIECE, own.start[low + 1]));
  }
  if (found <= LIST && share <= 1 << OFFSET) {
    for (int i = 0; i < found; i += 32) {
      const int known = i + lane < found ? list[i + lane] : -1;
      const int token = (int)begin + (known & ((1 << OFFSET) - 1));
      put(order, own.start, count, known < 0 ? -1 : known >> OFFSET, token);
    }
    return;
  }
  for (index_t at = begin; at < end; at += 32 * AHEAD) {
    index_t id[AHEAD];
    read(id, ids, at, end);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const index_t of = id[u] - first;
      const bool mine = of >= 0 && of < rows;
      if (__ballot_sync(ALL, mine))
        put(order, own.start, count, mine ? (int)of : -1, (int)(at + u * 32 + lane));
    }
  }
}
