// Second kernel of the token sort: a stable counting sort of the tokens by id; beside it, sums of positions.
//
// A block owns every 2^bits-th row of the table, OWNER_ROWS at most. Its tokens are in as many sorted runs as
// embedding_partition.cu had blocks. The counts of earlier owners in these runs give the offset of its part
// of the output, so that no block waits for another. Each warp takes a share of the runs, in order, and
// counts tokens by row; prefix sums over warps and rows give each token its offset. The result does not
// depend on the order of atomics, and no memory has to be cleared. Ids that name no row are left out. Blocks
// past the owners sum positions (see embedding.cu) meanwhile. Bytes: from L2, 8 for each run and 4 for each
// token, twice; a few ints for each token and row.
#include "sort.cuh"
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
constexpr int AHEAD = 4;  // loads of a lane in flight

// Shared memory of a block: counts by warp and row, which become offsets; where rows begin in the sorted
// order and in the block's pieces; where runs begin in bucket_tokens, and the number of the block's tokens in
// earlier runs.
struct Shared {
  int count[ORDER_WARPS][OWNER_ROWS];
  int start[OWNER_ROWS + 1], piece[OWNER_ROWS + 1];
  int from[RUNS], run[RUNS + 1];
  int scratch[ORDER_WARPS];
};

// Return the number of the block's tokens; `base` gets the number of earlier owners' tokens.
__device__ __forceinline__ int read_runs(Shared& own, const int2* heads, int runs, int& base) {
  int all = 0, below = 0, unused;
  for (int at = 0; at < runs; at += OWNER_ROWS) {
    const int one = at + threadIdx.x;
    const int2 head = one < runs ? heads[one] : make_int2(0, 0);
    const int earlier = block_exclusive_sum<ORDER_WARPS>(head.y, own.scratch, unused);
    if (one < runs) own.from[one] = head.x, own.run[one] = all + earlier;
    all += unused;
    below += head.x;
  }
  if (threadIdx.x == 0) own.run[runs] = all;
  block_exclusive_sum<ORDER_WARPS>(below, own.scratch, base);
  return all;
}

// Load the block's tokens `at`, `at` + 32, ... below `end`: their rows among the block's (-1 past the end)
// and their numbers. A binary search finds each one's run; AHEAD searches are interleaved.
__device__ __forceinline__ void load_tokens(const Shared& own, const int* bucket_tokens, int at, int end,
                                           int runs, index_t share, int (&row)[AHEAD],
                                           int (&token)[AHEAD]) {
  int run[AHEAD] = {};  // the last that begins at that token or before
  // Powers of two from the number of runs down. Every lane takes the same number of steps, whatever it finds.
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
    // Positions past the end are clamped to the last token: the load is valid, and its row becomes -1 below.
    packed[u] = bucket_tokens[run[u] * share + within];
  }
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) {
    row[u] = at + 32 * u < end ? packed[u] >> OFFSET : -1;
    token[u] = (int)(run[u] * share) + (packed[u] & ((1 << OFFSET) - 1));
  }
}

// heads: (owners, runs) and bucket_tokens: (tokens,), `share` a run: see embedding_partition.cu.
// from: (owners * OWNER_ROWS + 1,), where the tokens of each of an owner's rows begin in order: (tokens,).
// Rows with more than PIECE tokens are cut into pieces of CHUNK sorted tokens.
// pieces: (2 * tokens / PIECE + 1,), begin and end of each in `order`. tickets: one for each piece and slice,
// set to 0. split_rows: (tokens / PIECE + 1,), a row that was cut, its first piece and their number.
// owner_pieces:
// (owners,), each owner's first piece, their number, its first split row, their number. An owner writes at
// offsets that follow from its tokens' offset, so that no two overlap.
//
// grad, dpositions: see embedding.cu; a group sums one position in one of `lead` slices.
//
// heads and bucket_tokens are not restrict: embedding_partition.cu may still write them when this kernel
// begins, and a restrict pointer would let the compiler read them before the wait.
extern "C" __global__ void __launch_bounds__(OWNER_ROWS, 32 / ORDER_WARPS)
embedding_order(const int2* heads, const int* bucket_tokens, const WEFT_T* __restrict__ grad,
                int* __restrict__ from, int* __restrict__ order, int4* __restrict__ owner_pieces,
                int2* __restrict__ pieces, int4* __restrict__ split_rows, int* __restrict__ tickets,
                WEFT_T* __restrict__ dpositions, index_t runs, index_t share, index_t bits,
                index_t places, index_t lead, index_t batch, index_t length, index_t columns,
                index_t stride, index_t slices) {
  extern __shared__ int dynamic_shared[];
  // The next kernel may start its blocks while this one runs; it waits before it reads this one's output.
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, owners = 1 << bits;
  // No wait here: only plans without overlapping launches have a lead above 0, and with it these blocks.
  if (blockIdx.x >= owners) {
    const index_t task = (blockIdx.x - owners) * (OWNER_ROWS / LANES) + threadIdx.x / LANES;
    const index_t column = (task / places * LANES + threadIdx.x % LANES) * N;
    if (task >= places * lead || column >= columns) return;
    sum_place(grad + column, dpositions + column, task % places, (int)batch, length, columns,
              stride);
    return;
  }
  Shared& own = *reinterpret_cast<Shared*>(dynamic_shared);
  const index_t first = (index_t)blockIdx.x * OWNER_ROWS;
  const int row = threadIdx.x;
  int* count = own.count[warp];
  // A warp has its own row of counters: it adds without conflicts with other warps, and its tokens stay in
  // order.
  for (int i = lane; i < OWNER_ROWS; i += 32) count[i] = 0;
  // Everything above touches no output of embedding_partition.cu.
  wait_for_previous_kernel();
  int base;
  const int all = read_runs(own, heads + blockIdx.x * runs, (int)runs, base);
  const int each = (all + OWNER_ROWS - 1) / OWNER_ROWS * 32;
  const int begin = min(warp * each, all), end = min(begin + each, all);
  const bool once = begin + 32 * AHEAD >= end;  // then they stay in registers for the scatter
  int row_index[AHEAD] = {}, token[AHEAD] = {};
  for (int at = begin; at < end; at += 32 * AHEAD) {
    load_tokens(own, bucket_tokens, at + lane, end, (int)runs, share, row_index, token);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
      if (row_index[u] >= 0) atomicAdd(&count[row_index[u]], 1);
  }
  __syncthreads();

  // Thread `row` turns its row's counts into offsets: warp w's tokens of the row follow those of warps before
  // it.
  int whole, mine = 0;
#pragma unroll 8
  for (int w = 0; w < ORDER_WARPS; ++w) {
    const int row_index = own.count[w][row];
    own.count[w][row] = mine;
    mine += row_index;
  }
  const int start = base + block_exclusive_sum<ORDER_WARPS>(mine, own.scratch, whole);
#pragma unroll 8
  for (int w = 0; w < ORDER_WARPS; ++w) own.count[w][row] += start;
  const int cut = mine > PIECE ? (mine + CHUNK - 1) / CHUNK : 0;
  int parts = 0, long_rows = 0, part = 0, nth = 0;
  // Most owners have no long row and skip both scans. The vote is uniform, and is the barrier after the
  // counts.
  if (__syncthreads_or(cut)) {
    part = block_exclusive_sum<ORDER_WARPS>(cut, own.scratch, parts);
    nth = block_exclusive_sum<ORDER_WARPS>(cut > 0, own.scratch, long_rows);
  }
  // An owner's tokens from `base` on make at most 2 / PIECE pieces and 1 / PIECE split rows each, so that
  // these offsets leave room without a scan over the owners.
  const int first_piece = (int)(2 * (index_t)base / PIECE), first_split = base / PIECE;
  from[first + row] = own.start[row] = start;
  own.piece[row] = part;
  if (cut) split_rows[first_split + nth] = make_int4((row << bits) + (int)blockIdx.x, first_piece + part, cut,
                                                        0);
  if (row == 0) {
    owner_pieces[blockIdx.x] = make_int4(first_piece, parts, first_split, long_rows);
    own.start[OWNER_ROWS] = base + all, own.piece[OWNER_ROWS] = parts;
    if (blockIdx.x == owners - 1) from[first + OWNER_ROWS] = base + all;
  }
  __syncthreads();

  for (int p = threadIdx.x; p < parts; p += OWNER_ROWS) {
    int low = 0, high = OWNER_ROWS;  // the last row whose pieces begin at p or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (own.piece[middle] <= p ? low : high) = middle;
    }
    const int at = own.start[low] + (p - own.piece[low]) * CHUNK;
    pieces[first_piece + p] = make_int2(at, min(at + CHUNK, own.start[low + 1]));
    for (index_t s = 0; s < slices; ++s) tickets[(first_piece + p) * slices + s] = 0;
  }
  for (int at = begin; at < end; at += 32 * AHEAD) {
    // The second read of the tokens hits the L2: an owner with more tokens than its registers hold reads them
    // twice.
    if (!once) load_tokens(own, bucket_tokens, at + lane, end, (int)runs, share, row_index, token);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) scatter_stable(order, count, row_index[u], token[u]);
  }
}
