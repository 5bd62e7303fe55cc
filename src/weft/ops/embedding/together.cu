// The embedding's backward in one walk over places: each row of the gradient is read once for both.
//
// A warp has a place, a slice of columns and 32 sequences, LANES of them a group. What it reads for
// the place's sum is also what a row of the table begins with, where this token is the first that
// asks for it; the others' are read after it, and the row is written. So a token is read twice only
// where another asked before it. Which come after each other stands in a list in shared memory.
// Rows that nobody asks for are zeros, by warps that only write. Rows that more than PIECE tokens
// ask for are summed in pieces of THREADS places of the order, a block each; the last of a row's
// blocks to end adds the pieces, in their order: nobody waits, and whoever adds them gets the same
// bits. Bytes: the gradient, those tokens that are read again, both answers.
#include "overlap.cuh"
#include "rows.cuh"

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
#define EARLY 0  // of a warp's sequences whose rows the L2 is asked for at its start
#endif
constexpr int WARPS = SUM_WARPS, THREADS = WARPS * 32, SUMMERS = WARPS * GROUPS;
constexpr int OWN = OWNERS * 32;
constexpr int TOKENS = FLIGHT_TOKENS;  // of a group's rows that are under way together
constexpr int BESIDE = 4;  // places of the order that a lane has under way
constexpr int SLICE = LANES * N;
constexpr int PARTS = 4;  // of a piece's rows, or a row's pieces, that are under way together

// Where the kernel's tables are: ids: (batch, length); from: where the tokens of each of an owner's
// rows begin in order; see order.cu.
struct Tables {
  const index_t* ids;
  const int* from;
  const int* order;
  index_t vocabulary;
  int bits;
  // Where the row of an id stands in `from`, -1 if it is none.
  __device__ __forceinline__ index_t slot(index_t id) const {
    if (id < 0 || id >= vocabulary) return -1;
    return (id & ((1 << bits) - 1)) * OWN + (id >> bits);
  }
};

// What a group's lane has, of a lane's own `v`; all lanes of a warp ask together.
__device__ __forceinline__ int of_lane(int v, int lane) { return __shfl_sync(ALL, v, lane); }

// What a group reads, in turn, as words of a token and two bits: OWN, of this place; LAST, of those
// that ask for its row. A token that is not its row's first is OWN and has no LAST after it.
constexpr int FIRST_BIT = 2, OWN_TOKEN = 1, LAST_TOKEN = 2;
struct List {
  int word[GROUPS][LANES * PIECE], row[32];
};

// Asks the L2 for this slice of the rows of a place that a warp will read first: those are known
// before the order is.
__device__ __forceinline__ void bring_first(const WEFT_T* grad, index_t left, int first, int t,
                                            int batch, index_t length, index_t columns,
                                            index_t stride) {
  constexpr int LINE = 128 / sizeof(WEFT_T), LINES = (SLICE + LINE - 1) / LINE;
#pragma unroll
  for (int i = 0; i < EARLY * LINES; i += 32) {
    const int at = i + threadIdx.x % 32;
    const int from = first + at / LINES;
    const index_t column = left + at % LINES * LINE;
    if (at < EARLY * LINES && from < batch && t < length && column < columns)
      ask_l2(grad + (from * length + t) * stride + column);
  }
}

// Writes the lists of up to 32 sequences from `first`, LANES a group; how long a group's is.
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
    if (count > PIECE || at.order[start] != token) count = 0;
  }
  const int mine = max(count, (int)here);
  int upto = mine;
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) {
    const int other = __shfl_up_sync(ALL, upto, step, LANES);
    if (lane % LANES >= step) upto += other;
  }
  __syncwarp();  // what was listed before has been read
  list.row[lane] = (int)id;
  int* to = list.word[group] + upto - mine;
  if (here) to[0] = token << FIRST_BIT | OWN_TOKEN | (count == 1 ? LAST_TOKEN : 0);
  for (int j = 1; j < count; j += BESIDE) {
    int others[BESIDE];
#pragma unroll
    for (int i = 0; i < BESIDE; ++i)
      if (j + i < count) others[i] = at.order[start + j + i];
#pragma unroll
    for (int i = 0; i < BESIDE; ++i)
      if (j + i < count)
        to[j + i] = others[i] << FIRST_BIT | (j + i == count - 1 ? LAST_TOKEN : 0);
  }
  __syncwarp();
  return of_lane(upto, group * LANES + LANES - 1);
}

// Of two that are not negative, one instruction.
__device__ __forceinline__ index_t product(int a, int b) {
  return (index_t)((unsigned long long)(unsigned)a * (unsigned)b);
}

// Adds what a group's listed tokens have of this place to `place`, and writes the rows of the table
// that they end.
__device__ __forceinline__ void sum_listed(const List& list, int all, const WEFT_T* grad,
                                           WEFT_T* to, float (&place)[N], int columns,
                                           int stride, bool inside) {
  const int group = threadIdx.x % 32 / LANES;
  const int* word = list.word[group];
  const int* row = list.row + group * LANES - 1;
  Pack in[TOKENS];
  float sum[N];
  clear(sum);
#pragma unroll
  for (int u = 0; u < TOKENS; ++u)
    if (u < all) in[u] = load(grad + product(word[u] >> FIRST_BIT, stride));
#pragma unroll 1
  for (int k = 0; k < all; k += TOKENS, word += TOKENS) {
#pragma unroll
    for (int u = 0; u < TOKENS; ++u) {
      if (k + u >= all) break;
      const int its = word[u];
      float v[N];
      unpack(in[u], v);
      if (its & OWN_TOKEN) {
        ++row;
        add(place, v);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = v[j];
      } else {
        add(sum, v);
      }
      if ((its & LAST_TOKEN) && inside) store(to + product(*row, columns), sum);
      if (k + u + TOKENS < all)
        in[u] = load(grad + product(word[u + TOKENS] >> FIRST_BIT, stride));
    }
  }
}

// Places [first, first + WARPS / team) of one slice: a place has `team` warps, whose sums are added
// in order.
__device__ __forceinline__ void sum_places(const Tables& at, const WEFT_T* grad, WEFT_T* dweight,
                                           WEFT_T* dpositions, float (*held)[SLICE], List& list,
                                           int first, int team, int places, int batch, int length,
                                           index_t columns, int stride, index_t column,
                                           bool inside) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, member = warp % team;
  const int t = first + warp / team;
  float place[N];
  clear(place);
  if (t < places && t < length)
    for (int from = member * 32; from < batch; from += team * 32) {
      const int all = list_tokens(at, list, from, batch, length, t);
      sum_listed(list, all, grad, dweight + column, place, (int)columns, stride, inside);
    }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (GROUPS > 1) place[j] += __shfl_xor_sync(ALL, place[j], 16);
    if (team > 1) held[warp][j * LANES + lane] = place[j];
  }
  if (team > 1) {
    __syncthreads();
    for (int w = 1; w < team && member == 0; ++w)
#pragma unroll
      for (int j = 0; j < N; ++j) place[j] += held[warp + w][j * LANES + lane];
  }
  if (member == 0 && threadIdx.x % 32 < LANES && t < places && inside)
    store(dpositions + (index_t)t * columns + column, place);
}

// Zeros for those of 32 rows of `from`, from `first`, that nobody asks for, all columns of them.
__device__ __forceinline__ void clear_rows(const Tables& at, WEFT_T* dweight, index_t first,
                                           index_t columns) {
  const int lane = threadIdx.x % 32;
  const index_t mine = first + lane, row = (mine % OWN << at.bits) + mine / OWN;
  const bool none = row < at.vocabulary && at.from[mine] == at.from[mine + 1];
  float zeros[N];
  clear(zeros);
  for (unsigned left = __ballot_sync(ALL, none); left; left &= left - 1) {
    const int one = of_lane((int)row, __ffs(left) - 1);
    for (index_t c = lane * N; c < columns; c += 32 * N)
      store(dweight + one * columns + c, zeros);
  }
}

// The `nth` of all pieces that the owners found: where it stands in `pieces`; -1 past the last.
__device__ __forceinline__ int locate(const int4* tops, int owners, int nth) {
  constexpr int SIDE = 4;
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < owners; first += 32 * SIDE) {
    int from[SIDE], its[SIDE], upto = 0;
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      const int owner = first + lane * SIDE + i;
      const int4 top = owner < owners ? tops[owner] : make_int4(0, 0, 0, 0);
      from[i] = top.x, its[i] = top.y;
      upto += its[i];
    }
    const int mine = upto;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(ALL, upto, step);
      if (lane >= step) upto += other;
    }
    int rest = nth - (upto - mine), at = -1;  // among what this lane's owners found
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      if (at < 0 && rest < its[i]) at = from[i] + rest;
      rest -= its[i];
    }
    const unsigned past = __ballot_sync(ALL, upto > nth);
    if (past) return of_lane(at, __ffs(past) - 1);
    nth -= of_lane(upto, 31);
  }
  return -1;
}

// The piece at `nth` of one slice, by a block: a group has every SUMMERS-th of its tokens.
__device__ __forceinline__ void sum_piece(const Tables& at, const WEFT_T* grad, int2 piece, int nth,
                                          float (*held)[SLICE], float* partial, int* tickets,
                                          WEFT_T* dweight, index_t columns, index_t stride,
                                          index_t slice, index_t slices) {
  __shared__ bool last;
  const int lane = threadIdx.x % LANES, summer = threadIdx.x / LANES;
  const int shift = threadIdx.x % 32 / LANES * LANES;
  const index_t mine = (slice * LANES + lane) * N, base = slice * SLICE;
  const int token_at = piece.x + summer + lane * SUMMERS;
  const int token = token_at < piece.y ? at.order[token_at] : 0;
  const index_t row = at.ids[at.order[piece.x]], slot = at.slot(row);
  const int start = at.from[slot], all = at.from[slot + 1] - start;
  const int parts = (all + THREADS - 1) / THREADS, part = (piece.x - start) / THREADS;
  grad += mine < columns ? mine : 0;
  float sum[N];
  clear(sum);
#pragma unroll 1
  for (int k = 0; k < LANES && piece.x + k * SUMMERS < piece.y; k += PARTS) {
    Pack in[PARTS];
#pragma unroll
    for (int u = 0; u < PARTS; ++u) {
      const index_t one = of_lane(token, shift + k + u);
      if (piece.x + summer + (k + u) * SUMMERS < piece.y) in[u] = load(grad + one * stride);
    }
#pragma unroll
    for (int u = 0; u < PARTS; ++u)
      if (piece.x + summer + (k + u) * SUMMERS < piece.y) add(sum, in[u]);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) held[summer][j * LANES + lane] = sum[j];
  __syncthreads();
  for (int i = threadIdx.x; i < SLICE && base + i < columns; i += THREADS) {
    float one = 0;
#pragma unroll
    for (int g = 0; g < SUMMERS; ++g) one += held[g][i % N * LANES + i / N];
    if (parts == 1) dweight[row * columns + base + i] = from_float<WEFT_T>(one);
    else partial[nth * columns + base + i] = one;
  }
  __threadfence();
  __syncthreads();
  if (parts == 1) return;
  const index_t begin = nth - part;
  if (threadIdx.x == 0) last = atomicAdd(tickets + begin * slices + slice, 1) == parts - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = threadIdx.x; i < SLICE && base + i < columns; i += THREADS) {
    float one = 0;
    for (int p = 0; p < parts; p += PARTS) {
      float in[PARTS];
#pragma unroll
      for (int u = 0; u < PARTS; ++u)
        in[u] = p + u < parts ? __ldcg(partial + (begin + p + u) * columns + base + i) : 0.0f;
#pragma unroll
      for (int u = 0; u < PARTS; ++u) one += in[u];
    }
    dweight[row * columns + base + i] = from_float<WEFT_T>(one);
  }
  __syncthreads();
}

// grad: (batch * length, columns), rows `stride` apart; ids: (batch, length); from, order, tops,
// pieces, tickets: see order.cu. dweight: (vocabulary, columns); dpositions: (places, columns);
// partial: a float row for each piece. First blocks of pieces, then slice by slice those of places,
// of `team` warps each, and evenly among them those of rows that nobody asks for: those read, these
// write. What order.cu writes is not restrict: it may still write when this kernel begins.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
embedding_together(const WEFT_T* __restrict__ grad, const index_t* __restrict__ ids,
                   const int* from, const int* order, const int4* tops, const int2* pieces,
                   int* tickets, WEFT_T* __restrict__ dweight, WEFT_T* __restrict__ dpositions,
                   float* partial, index_t vocabulary, index_t bits, index_t places, index_t batch,
                   index_t length, index_t columns, index_t stride, index_t slices, index_t team,
                   index_t piece_blocks, index_t place_blocks, index_t clear_blocks) {
  __shared__ float held[SUMMERS][SLICE];
  __shared__ List lists[WARPS];
  const Tables at = {ids, from, order, vocabulary, (int)bits};
  const int owners = 1 << bits;
  if (blockIdx.x < piece_blocks) {
    wait_for_previous();
    for (index_t slice = 0; slice < slices; ++slice)
      for (int nth = blockIdx.x;; nth += (int)piece_blocks) {
        const int piece = locate(tops, owners, nth);
        if (piece < 0 && slice == 0 && nth == blockIdx.x) return;
        if (piece < 0) break;
        sum_piece(at, grad, pieces[piece], piece, held, partial, tickets, dweight, columns, stride,
                  slice, slices);
      }
    return;
  }
  const index_t each = place_blocks + clear_blocks, block = (blockIdx.x - piece_blocks) % each;
  const index_t slice = (blockIdx.x - piece_blocks) / each;
  const index_t before = block * clear_blocks / each;  // of those that write, blocks before this
  const bool writes = (block + 1) * clear_blocks / each > before;
  const int warp = threadIdx.x / 32, first = (int)((block - before) * (WARPS / team));
  if (EARLY && !writes)
    bring_first(grad, slice * SLICE, warp % (int)team * 32, first + warp / (int)team, (int)batch,
                length, columns, stride);
  wait_for_previous();
  if (writes) {
    const index_t row = ((slice * clear_blocks + before) * WARPS + warp) * 32;
    if (row < (index_t)owners * OWN) clear_rows(at, dweight, row, columns);
    return;
  }
  const index_t column = (slice * LANES + threadIdx.x % LANES) * N;
  const bool inside = column < columns;
  sum_places(at, grad + (inside ? column : 0), dweight, dpositions, held, lists[warp], first,
             (int)team, (int)places, (int)batch, (int)length, columns, (int)stride, column, inside);
}
