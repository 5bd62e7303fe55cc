// The embedding's backward with positions: one loop over positions sums dpositions and dweight together.
//
// A warp takes a position, a slice of columns and 32 sequences, LANES of them for each group. The gradient
// row that it reads for the position's sum also starts the sum of a table row, if its token is the first with
// that id; it then reads the id's other tokens and writes the row. So only a token whose id occurred earlier
// is read twice. A list in shared memory has the tokens in the order in which a group reads them. Rows that
// no id names are set to zero by warps that only write. Rows with more than PIECE tokens are summed in pieces
// of THREADS sorted tokens, one block each. The block of a row that finishes last (by a counter) adds the
// row's pieces in their order: no block waits, and the bits do not depend on which one it is. Bytes: the
// gradient, the tokens that are read again, both outputs.
#include "overlap.cuh"
#include "row_access.cuh"

#ifndef PIECE
#define PIECE 16
#endif
#ifndef OWNERS
#define OWNERS 16
#endif
#ifndef FLIGHT_TOKENS
#define FLIGHT_TOKENS 4
#endif
#ifndef RESIDENT
#define RESIDENT 4
#endif
#ifndef SUM_WARPS
#define SUM_WARPS 8
#endif
#ifndef EARLY
#define EARLY 0  // sequences of a warp whose rows are prefetched into the L2 at its start
#endif
constexpr int WARPS = SUM_WARPS, THREADS = WARPS * 32, SUMMERS = WARPS * GROUPS;
constexpr int OWNER_ROWS = OWNERS * 32;
constexpr int TOKENS_IN_FLIGHT = FLIGHT_TOKENS;  // gradient rows of a group in flight
constexpr int ORDER_LOADS = 4;  // loads of the sorted order in flight in a lane
constexpr int SLICE = LANES * N;
constexpr int PIECE_LOADS = 4;  // loads in flight of a piece's rows, or of a row's pieces

// Sorted tokens: ids: (batch, length); from: where the tokens of each of an owner's rows begin in `order`;
// see embedding_sort.cu.
struct Tables {
  const index_t* ids;
  const int* from;
  const int* order;
  index_t vocabulary;
  int bits;
  // Return the index of an id's row in `from`, -1 for an id that names no row.
  // The id is compared with the table first: an id out of range must not become an address.
  __device__ __forceinline__ index_t slot(index_t id) const {
    if (id < 0 || id >= vocabulary) return -1;
    return (id & ((1 << bits) - 1)) * OWNER_ROWS + (id >> bits);
  }
};

// Return lane `lane`'s `v`; all lanes of a warp call together.
__device__ __forceinline__ int lane_value(int v, int lane) { return __shfl_sync(FULL_MASK, v, lane); }

// The tokens that a group reads, in this order, as ints of a token and two bits: OWN_TOKEN: the token is at
// this position; LAST_TOKEN: it ends its table row. A token that is not the first of its row is OWN without
// LAST.
constexpr int FIRST_BIT = 2, OWN_TOKEN = 1, LAST_TOKEN = 2;
struct List {
  // A list has at most PIECE tokens for each lane's sequence: rows with more tokens are cut into pieces.
  int word[GROUPS][LANES * PIECE], row[32];
};

// Prefetch this slice of the rows that a warp reads first: they are known before the tokens are sorted.
__device__ __forceinline__ void prefetch_first_rows(const WEFT_T* grad, index_t left, int first, int t,
                                            int batch, index_t length, index_t columns,
                                            index_t stride) {
  constexpr int LINE = 128 / sizeof(WEFT_T), LINES = (SLICE + LINE - 1) / LINE;
#pragma unroll
  for (int i = 0; i < EARLY * LINES; i += 32) {
    const int at = i + threadIdx.x % 32;
    const int from = first + at / LINES;
    const index_t column = left + at % LINES * LINE;
    if (at < EARLY * LINES && from < batch && t < length && column < columns)
      prefetch_l2(grad + (from * length + t) * stride + column);
  }
}

// Write the lists of up to 32 sequences from `first`, LANES for each group; return the length of the group's
// list.
__device__ __forceinline__ int list_tokens(const Tables& at, List& list, int first, int batch,
                                           int length, int t) {
  const int lane = threadIdx.x % 32, group = lane / LANES;
  const int token = (first + lane) * length + t;
  int count = 0, start = 0;
  const bool here = first + lane < batch;
  const index_t id = here ? at.ids[token] : -1, slot = at.slot(id);
  if (slot >= 0) {
    start = at.from[slot];
    count = at.from[slot + 1] - start;
    // The first token of a row, in the sorted order, sums the row. A long row is summed in pieces by other
    // blocks.
    if (count > PIECE || at.order[start] != token) count = 0;
  }
  // A token that does not sum its row still takes one entry: its gradient row belongs to the position's sum.
  const int mine = max(count, (int)here);
  int inclusive = mine;
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, inclusive, step, LANES);
    if (lane % LANES >= step) inclusive += other;
  }
  __syncwarp();  // all lanes have read the previous list
  list.row[lane] = (int)id;
  int* to = list.word[group] + inclusive - mine;
  if (here) to[0] = token << FIRST_BIT | OWN_TOKEN | (count == 1 ? LAST_TOKEN : 0);
  for (int j = 1; j < count; j += ORDER_LOADS) {
    // ORDER_LOADS loads before the first use: the sorted order is in the L2, and one load at a time would
    // expose its latency for each token.
    int others[ORDER_LOADS];
#pragma unroll
    for (int i = 0; i < ORDER_LOADS; ++i)
      if (j + i < count) others[i] = at.order[start + j + i];
#pragma unroll
    for (int i = 0; i < ORDER_LOADS; ++i)
      if (j + i < count)
        to[j + i] = others[i] << FIRST_BIT | (j + i == count - 1 ? LAST_TOKEN : 0);
  }
  // The barrier also orders shared memory: the group's lanes now read words that other lanes wrote.
  __syncwarp();
  return lane_value(inclusive, group * LANES + LANES - 1);
}

// Multiply two non-negative ints into 64 bits: one instruction, which a signed product is not.
__device__ __forceinline__ index_t product(int a, int b) {
  return (index_t)((unsigned long long)(unsigned)a * (unsigned)b);
}

// Add the listed tokens of this position to `position_sum`, sum the listed tokens of each table row, and
// write each row at its last token.
__device__ __forceinline__ void sum_listed(const List& list, int all, const WEFT_T* grad,
                                           WEFT_T* to, float (&position_sum)[N], int columns,
                                           int stride, bool inside) {
  const int group = threadIdx.x % 32 / LANES;
  const int* word = list.word[group];
  const int* row = list.row + group * LANES - 1;
  Pack in[TOKENS_IN_FLIGHT];
  float sum[N];
  clear(sum);
#pragma unroll
  for (int u = 0; u < TOKENS_IN_FLIGHT; ++u)
    if (u < all) in[u] = load(grad + product(word[u] >> FIRST_BIT, stride));
#pragma unroll 1
  for (int k = 0; k < all; k += TOKENS_IN_FLIGHT, word += TOKENS_IN_FLIGHT) {
#pragma unroll
    for (int u = 0; u < TOKENS_IN_FLIGHT; ++u) {
      if (k + u >= all) break;
      const int row_index = word[u];
      float v[N];
      unpack(in[u], v);
      // OWN_TOKEN: the row belongs to this position, and it starts the sum of its table row without a second
      // load.
      if (row_index & OWN_TOKEN) {
        ++row;
        add(position_sum, v);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = v[j];
      } else {
        add(sum, v);
      }
      if ((row_index & LAST_TOKEN) && inside) store(to + product(*row, columns), sum);
      if (k + u + TOKENS_IN_FLIGHT < all)
        in[u] = load(grad + product(word[u + TOKENS_IN_FLIGHT] >> FIRST_BIT, stride));
    }
  }
}

// Sum positions [first, first + WARPS / warps_per_place) of one slice: a position has `warps_per_place`
// warps, whose sums are added in the order of the warps.
__device__ __forceinline__ void sum_places(const Tables& at, const WEFT_T* grad, WEFT_T* dweight,
                                           WEFT_T* dpositions, float (*partial_sums)[SLICE], List& list,
                                           int first, int warps_per_place, int places, int batch, int length,
                                           index_t columns, int stride, index_t column,
                                           bool inside) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, member = warp % warps_per_place;
  const int t = first + warp / warps_per_place;
  float position_sum[N];
  clear(position_sum);
  if (t < places && t < length)
    for (int from = member * 32; from < batch; from += warps_per_place * 32) {
      const int all = list_tokens(at, list, from, batch, length, t);
      sum_listed(list, all, grad, dweight + column, position_sum, (int)columns, stride, inside);
    }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    // With two groups in a warp, lanes 16 apart have the same columns of different sequences.
    if (GROUPS > 1) position_sum[j] += __shfl_xor_sync(FULL_MASK, position_sum[j], 16);
    if (warps_per_place > 1) partial_sums[warp][j * LANES + lane] = position_sum[j];
  }
  // The condition is uniform over the block, so that the barrier inside it is legal.
  if (warps_per_place > 1) {
    __syncthreads();
    for (int w = 1; w < warps_per_place && member == 0; ++w)
#pragma unroll
      for (int j = 0; j < N; ++j) position_sum[j] += partial_sums[warp + w][j * LANES + lane];
  }
  // Positions at or past `length` have no tokens: their sum is 0, which is written as well.
  if (member == 0 && threadIdx.x % 32 < LANES && t < places && inside)
    store(dpositions + (index_t)t * columns + column, position_sum);
}

// Write zeros to those of 32 rows of `from`, from `first` on, that no id names, in all columns.
__device__ __forceinline__ void clear_rows(const Tables& at, WEFT_T* dweight, index_t first,
                                           index_t columns) {
  const int lane = threadIdx.x % 32;
  const index_t mine = first + lane, row = (mine % OWNER_ROWS << at.bits) + mine / OWNER_ROWS;
  const bool none = row < at.vocabulary && at.from[mine] == at.from[mine + 1];
  float zeros[N];
  clear(zeros);
  // One empty row at a time, its columns by all 32 lanes, so that the stores are coalesced.
  for (unsigned left = __ballot_sync(FULL_MASK, none); left; left &= left - 1) {
    const int one = lane_value((int)row, __ffs(left) - 1);
    for (index_t c = lane * N; c < columns; c += 32 * N)
      store(dweight + one * columns + c, zeros);
  }
}

// Return the index in `pieces` of the `nth` piece of all owners; -1 past the last.
__device__ __forceinline__ int locate(const int4* owner_pieces, int owners, int nth) {
  constexpr int SIDE = 4;
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < owners; first += 32 * SIDE) {
    int from[SIDE], row_index[SIDE], inclusive = 0;
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      const int owner = first + lane * SIDE + i;
      const int4 top = owner < owners ? owner_pieces[owner] : make_int4(0, 0, 0, 0);
      from[i] = top.x, row_index[i] = top.y;
      inclusive += row_index[i];
    }
    const int mine = inclusive;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(FULL_MASK, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    int rest = nth - (inclusive - mine), at = -1;  // among the pieces of this lane's owners
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      if (at < 0 && rest < row_index[i]) at = from[i] + rest;
      rest -= row_index[i];
    }
    const unsigned past = __ballot_sync(FULL_MASK, inclusive > nth);
    if (past) return lane_value(at, __ffs(past) - 1);
    nth -= lane_value(inclusive, 31);
  }
  return -1;
}

// Sum the piece `nth` in one slice, with the whole block: a group sums every SUMMERS-th token.
__device__ __forceinline__ void sum_piece(const Tables& at, const WEFT_T* grad, int2 piece, int nth,
                                          float (*partial_sums)[SLICE], float* partial, int* tickets,
                                          WEFT_T* dweight, index_t columns, index_t stride,
                                          index_t slice, index_t slices) {
  // `partial_sums` is [group][element * LANES + lane], without bank conflicts for any N.
  __shared__ bool last;
  const int lane = threadIdx.x % LANES, summer = threadIdx.x / LANES;
  const int shift = threadIdx.x % 32 / LANES * LANES;
  const index_t mine = (slice * LANES + lane) * N, base = slice * SLICE;
  const int token_at = piece.x + summer + lane * SUMMERS;
  const int token = token_at < piece.y ? at.order[token_at] : 0;
  const index_t row = at.ids[at.order[piece.x]], slot = at.slot(row);
  const int start = at.from[slot], all = at.from[slot + 1] - start;
  // A row with PIECE < tokens <= THREADS is one piece: the block writes it directly, without `partial` and
  // ticket.
  const int parts = (all + THREADS - 1) / THREADS, part = (piece.x - start) / THREADS;
  grad += mine < columns ? mine : 0;
  float sum[N];
  clear(sum);
#pragma unroll 1
  for (int k = 0; k < LANES && piece.x + k * SUMMERS < piece.y; k += PIECE_LOADS) {
    Pack in[PIECE_LOADS];
#pragma unroll
    for (int u = 0; u < PIECE_LOADS; ++u) {
      const index_t one = lane_value(token, shift + k + u);
      if (piece.x + summer + (k + u) * SUMMERS < piece.y) in[u] = load(grad + one * stride);
    }
#pragma unroll
    for (int u = 0; u < PIECE_LOADS; ++u)
      if (piece.x + summer + (k + u) * SUMMERS < piece.y) add(sum, in[u]);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) partial_sums[summer][j * LANES + lane] = sum[j];
  __syncthreads();
  for (int i = threadIdx.x; i < SLICE && base + i < columns; i += THREADS) {
    float one = 0;
#pragma unroll
    for (int g = 0; g < SUMMERS; ++g) one += partial_sums[g][i % N * LANES + i / N];
    if (parts == 1) dweight[row * columns + base + i] = from_float<WEFT_T>(one);
    else partial[nth * columns + base + i] = one;
  }
  // Release: each thread's stores to `partial` are visible to the device before thread 0 counts the piece.
  __threadfence();
  __syncthreads();
  if (parts == 1) return;
  const index_t begin = nth - part;
  // One ticket for each split row and slice. embedding_order sets it to 0 in each call.
  if (threadIdx.x == 0) last = atomicAdd(tickets + begin * slices + slice, 1) == parts - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();  // acquire: the other blocks' stores, counted above, are visible from here on
  for (int i = threadIdx.x; i < SLICE && base + i < columns; i += THREADS) {
    float one = 0;
    for (int p = 0; p < parts; p += PIECE_LOADS) {
      float in[PIECE_LOADS];
#pragma unroll
      for (int u = 0; u < PIECE_LOADS; ++u)
        // __ldcg reads the L2: the L1 of this SM could have stale lines of `partial` from an earlier call.
        in[u] = p + u < parts ? __ldcg(partial + (begin + p + u) * columns + base + i) : 0.0f;
#pragma unroll
      for (int u = 0; u < PIECE_LOADS; ++u) one += in[u];
    }
    dweight[row * columns + base + i] = from_float<WEFT_T>(one);
  }
  __syncthreads();
}

// grad: (batch * length, columns), rows `stride` apart; ids: (batch, length); from, order, owner_pieces,
// pieces, tickets: see embedding_sort.cu. dweight: (vocabulary, columns); dpositions: (places, columns);
// partial: a float row for each piece. The grid has the blocks of pieces first. Then it goes slice by slice:
// blocks of positions, of `warps_per_place` warps for each, and evenly among them blocks that write zeros to
// rows without tokens. The former read memory while the latter write it. The outputs of embedding_sort.cu are
// not restrict: it may still write them when this kernel begins.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
embedding_together(const WEFT_T* __restrict__ grad, const index_t* __restrict__ ids,
                   const int* from, const int* order, const int4* owner_pieces, const int2* pieces,
                   int* tickets, WEFT_T* __restrict__ dweight, WEFT_T* __restrict__ dpositions,
                   float* partial, index_t vocabulary, index_t bits, index_t places, index_t batch,
                   index_t length, index_t columns, index_t stride, index_t slices, index_t warps_per_place,
                   index_t piece_blocks, index_t place_blocks, index_t clear_blocks) {
  __shared__ float partial_sums[SUMMERS][SLICE];
  __shared__ List lists[WARPS];
  const Tables at = {ids, from, order, vocabulary, (int)bits};
  const int owners = 1 << bits;
  if (blockIdx.x < piece_blocks) {
    wait_for_previous_kernel();
    for (index_t slice = 0; slice < slices; ++slice)
      for (int nth = blockIdx.x;; nth += (int)piece_blocks) {
        // All warps of the block compute the same piece, so that the barriers in sum_piece are uniform.
        const int piece = locate(owner_pieces, owners, nth);
        if (piece < 0 && slice == 0 && nth == blockIdx.x) return;
        if (piece < 0) break;
        sum_piece(at, grad, pieces[piece], piece, partial_sums, partial, tickets, dweight, columns, stride,
                  slice, slices);
      }
    return;
  }
  const index_t each = place_blocks + clear_blocks, block = (blockIdx.x - piece_blocks) % each;
  const index_t slice = (blockIdx.x - piece_blocks) / each;
  // Bresenham's rule: clear_blocks of every `each` blocks write zeros, evenly spread.
  const index_t before = block * clear_blocks / each;  // of those that write, blocks before this
  const bool writes = (block + 1) * clear_blocks / each > before;
  const int warp = threadIdx.x / 32, first = (int)((block - before) * (WARPS / warps_per_place));
  // Before the wait: the addresses of these rows do not depend on the sort, so that they arrive while it
  // ends.
  if (EARLY && !writes)
    prefetch_first_rows(grad, slice * SLICE, warp % (int)warps_per_place * 32,
                        first + warp / (int)warps_per_place, (int)batch, length, columns, stride);
  wait_for_previous_kernel();
  if (writes) {
    const index_t row = ((slice * clear_blocks + before) * WARPS + warp) * 32;
    if (row < (index_t)owners * OWNER_ROWS) clear_rows(at, dweight, row, columns);
    return;
  }
  const index_t column = (slice * LANES + threadIdx.x % LANES) * N;
  const bool inside = column < columns;
  sum_places(at, grad + (inside ? column : 0), dweight, dpositions, partial_sums, lists[warp], first,
             (int)warps_per_place, (int)places, (int)batch, (int)length, columns, (int)stride, column,
             inside);
}
