// Embedding's forward, and its backward without positions: a warp moves 32 accesses of N elements at a time.
//
// Backward: columns are processed slice by slice, so that each element of the gradient, which its position's
// row and its token's row need, comes from memory once and then from the L2. A slice's positions are summed
// `lead` slices ahead of its tokens. Sums are in float, in a fixed order. Bytes: forward, the rows that ids
// name, positions, the output; backward, the gradient and both outputs, each row of which is written once,
// zeros too.
#include "row_access.cuh"

#ifndef PIECE
#define PIECE 16
#endif
#ifndef ROWS
#define ROWS 16
#endif
#ifndef OWNERS
#define OWNERS 16
#endif
#ifndef LAST
#define LAST 1
#endif
constexpr int WARPS = 4, SEQUENCES = 4;
constexpr int SUM_WARPS = 8, MERGE_WARPS = 16;
constexpr int PIECE_LOADS = 4;  // pieces of a row that a merging warp has in flight
#ifndef FLIGHT_TOKENS
#define FLIGHT_TOKENS 5
#endif
#ifndef RESIDENT
#define RESIDENT 3
#endif
constexpr int TOKENS_IN_FLIGHT = FLIGHT_TOKENS;  // gradient rows of a group in flight, up to 16
static_assert(32 * OWNERS % ROWS == 0, "a group's rows are one owner's");
static_assert(ROWS < LANES, "a lane for the begin of each row, and one for the end");

// Grid: one dimension, (batch / SEQUENCES) * length * slices warps. Neighbouring warps take neighbouring
// slices of one row, so that a row of the table is read by warps that run at the same time.
// weight: (vocabulary, columns), ids: (batch, length), positions: (>= length, columns) or null; y:
// (batch, length, columns). A warp computes one position of SEQUENCES sequences: positions is read once for
// them. Bytes of a warp: SEQUENCES rows of weight and of y, one row of positions, a slice of each.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
embedding_forward(const WEFT_T* __restrict__ weight, const index_t* __restrict__ ids,
                  const WEFT_T* __restrict__ positions, WEFT_T* __restrict__ y,
                  index_t vocabulary, index_t batch, index_t length, index_t columns,
                  index_t weight_stride, index_t positions_stride) {
  const index_t slices = (columns + 32 * N - 1) / (32 * N);
  const index_t task = (index_t)blockIdx.x * WARPS + threadIdx.x / 32;
  const index_t column = (task % slices * 32 + threadIdx.x % 32) * N;
  const index_t t = task / slices % length, first = task / slices / length * SEQUENCES;
  if (first >= batch || column >= columns) return;
  // All ids are loaded before the first row: a row's address depends on its id, and a load at a time would
  // expose the latency of memory twice for each sequence.
  index_t id[SEQUENCES];
#pragma unroll
  for (int q = 0; q < SEQUENCES; ++q)
    id[q] = first + q < batch ? ids[(first + q) * length + t] : -1;
  // An id that names no row gives a row of NaN. It is compared before it becomes an address: so a bad id
  // never reads outside the table; the check on the host may be off (see spec.py).
  float none[N];
#pragma unroll
  for (int j = 0; j < N; ++j) none[j] = __int_as_float(0x7fc00000);
  Pack row[SEQUENCES];
#pragma unroll
  for (int q = 0; q < SEQUENCES; ++q) {
    row[q] = packed(none);
    if (id[q] >= 0 && id[q] < vocabulary) row[q] = load(weight + id[q] * weight_stride + column);
  }
  float position_row[N] = {};
  if (positions) add(position_row, load(positions + t * positions_stride + column));
#pragma unroll
  for (int q = 0; q < SEQUENCES; ++q) {
    if (first + q >= batch) break;
    float sum[N];
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = position_row[j];
    add(sum, row[q]);
    store(y + ((first + q) * length + t) * columns + column, sum);
  }
}

// LAST: the load marks its line "evict first". Each row of a slice is read at most twice, and this is the
// last read.
// Load a row of the gradient that is not read again.
__device__ __forceinline__ Pack load_last(const WEFT_T* from) {
  return LAST ? Streamed<sizeof(Pack)>::load(from) : load(from);
}

// Return the `v` of a group's lane `i`; all lanes of a warp call together.
__device__ __forceinline__ int lane_value(int v, int i) { return __shfl_sync(FULL_MASK, v, i, LANES); }

// Sum and write the table rows 0, apart, ... below rows * apart at `to`. Lane q has the begin of the q-th
// row's tokens in `order`; the next lane has their end. Rows with more than PIECE tokens are left out.
// TOKENS_IN_FLIGHT loads are in flight. The groups of a warp run in lockstep, each on its own rows.
__device__ __forceinline__ void sum_rows(const WEFT_T* grad, const int* order, WEFT_T* to,
                                         int begins, int rows, index_t apart, int stride,
                                         bool inside) {
  // __ballot_sync returns the bits of the whole warp; `shift` moves a group's own bits to bit 0.
  const int lane = threadIdx.x % LANES, shift = threadIdx.x % 32 / LANES * LANES;
  const int next = __shfl_down_sync(FULL_MASK, begins, 1, LANES);
  const bool is_long = lane < rows && next - begins > PIECE;
  // Every lane votes, also those past `rows`: a shuffle or vote with FULL_MASK needs all 32 lanes.
  const unsigned left_out = __ballot_sync(FULL_MASK, is_long) >> shift;
  const int mine = lane < rows && !is_long ? next - begins : 0;
  // Inclusive prefix sum over the group's lanes: the group's tokens, without the rows that are left out,
  // become one list.
  int inclusive = mine;
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, inclusive, step, LANES);
    if (lane >= step) inclusive += other;
  }
  const int before = inclusive - mine, skip = begins - before;
  const int all = lane_value(inclusive, LANES - 1);
  int most = all;
  // The two groups of a warp must take the same number of steps, since the loop has shuffles for all 32
  // lanes.
  if (GROUPS > 1) most = max(most, __shfl_xor_sync(FULL_MASK, all, LANES % 32));
  float sum[N];
  clear(sum);
  int q = 0;
  for (int at = 0; at < most; at += LANES) {
    int row_index = 0;  // the row of token at + lane: the last that begins there or before
#pragma unroll
    for (int r = 1; r < ROWS; ++r) {
      const int where = lane_value(before, r);
      row_index += r < rows && where <= at + lane;
    }
    const int sorted_index = lane_value(skip, row_index) + at + lane;
    const int token = at + lane < all ? order[sorted_index] : 0;
    const int left = min(all - at, LANES), steps = min(most - at, LANES);
    Pack in[TOKENS_IN_FLIGHT];
#pragma unroll
    for (int u = 0; u < TOKENS_IN_FLIGHT; ++u) {
      const int one = lane_value(token, u);
      if (u < left) in[u] = load_last(grad + (index_t)one * stride);
    }
#pragma unroll 1
    for (int k = 0; k < steps; k += TOKENS_IN_FLIGHT) {
#pragma unroll
      for (int u = 0; u < TOKENS_IN_FLIGHT; ++u) {  // the next load starts when one is added
        const int row = lane_value(row_index, (k + u) % LANES);
        const int one = lane_value(token, (k + u + TOKENS_IN_FLIGHT) % LANES);
        if (k + u >= left) continue;
        // A new row begins: the sums of all rows before it are complete. Rows without tokens are written too,
        // as zeros.
        for (; q < row; ++q) {
          if (inside && !(left_out >> q & 1)) store(to + q * apart, sum);
          clear(sum);
        }
        add(sum, in[u]);
        if (k + u + TOKENS_IN_FLIGHT < left) in[u] = load_last(grad + (index_t)one * stride);
      }
    }
  }
  // The last row with tokens, and the empty rows after it.
  for (; q < rows; ++q) {
    if (inside && !(left_out >> q & 1)) store(to + q * apart, sum);
    clear(sum);
  }
}

// Return the index of the `nth` piece (or, with `rows`, of the `nth` split row) of all owners; -1 past the
// last. All lanes of a warp call together. A lane sums the counts of SIDE owners, and a prefix sum over the
// lanes tells which lane has the nth: 128 owners in one step.
__device__ __forceinline__ int locate(const int4* heads, int owners, int nth, bool rows) {
  constexpr int SIDE = 4;
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < owners; first += 32 * SIDE) {
    int from[SIDE], row_index[SIDE], inclusive = 0;
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      const int owner = first + lane * SIDE + i;
      const int4 head = owner < owners ? heads[owner] : make_int4(0, 0, 0, 0);
      from[i] = rows ? head.z : head.x, row_index[i] = rows ? head.w : head.y;
      inclusive += row_index[i];
    }
    const int mine = inclusive;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(FULL_MASK, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    int rest = nth - (inclusive - mine), at = -1;  // among what this lane's owners found
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      if (at < 0 && rest < row_index[i]) at = from[i] + rest;
      rest -= row_index[i];
    }
    // The first lane whose prefix exceeds nth owns the piece; its answer is broadcast to the warp.
    const unsigned past = __ballot_sync(FULL_MASK, inclusive > nth);
    if (past) return __shfl_sync(FULL_MASK, at, __ffs(past) - 1);
    nth -= __shfl_sync(FULL_MASK, inclusive, 31);
  }
  return -1;
}

// Sum one piece of the sorted tokens; a group with an empty piece writes nothing.
__device__ __forceinline__ void sum_piece(const WEFT_T* grad, const int* order, int2 piece,
                                          float* to, index_t stride, bool inside) {
  const int lane = threadIdx.x % LANES;
  float sum[N];
  clear(sum);
#pragma unroll 1
  for (int first = 0; first < PIECE; first += LANES) {
    const int left = min(piece.y - piece.x - first, LANES);
    const int token = lane < left ? order[piece.x + first + lane] : 0;
    for (int k = 0; k < min(PIECE, LANES); k += LOADS_IN_FLIGHT) {
      Pack in[LOADS_IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < LOADS_IN_FLIGHT; ++u) {
        const int one = lane_value(token, (k + u) % LANES);
        if (k + u < left) in[u] = load_last(grad + (index_t)one * stride);
      }
#pragma unroll
      for (int u = 0; u < LOADS_IN_FLIGHT; ++u)
        if (k + u < left) add(sum, in[u]);
    }
  }
  // Partial sums stay in float32: rounding each piece to the output's type would add an error for each piece.
  Floats out;
#pragma unroll
  for (int j = 0; j < N; ++j) out.at[j] = sum[j];
  if (inside && piece.y > piece.x) *reinterpret_cast<Floats*>(to) = out;
}

// grad: (batch * length, columns), rows `stride` apart; from, order, heads, pieces: see embedding_sort.cu.
// dweight: (vocabulary, columns); dpositions: (places, columns); partial: a float row for each piece. The
// grid goes slice by slice. A slice has piece_blocks blocks for pieces of rows with more than PIECE tokens,
// row_blocks for the other rows, and place_blocks for positions (of the slice `lead` further on, while there
// is one). A group sums one piece after another, ROWS rows, or one position.
extern "C" __global__ void __launch_bounds__(SUM_WARPS * 32, RESIDENT)
embedding_backward(const WEFT_T* __restrict__ grad, const int* __restrict__ from,
                   const int* __restrict__ order, const int4* __restrict__ heads,
                   const int2* __restrict__ pieces, WEFT_T* __restrict__ dweight,
                   WEFT_T* __restrict__ dpositions, float* __restrict__ partial,
                   index_t vocabulary, index_t bits, index_t places, index_t batch,
                   index_t length, index_t columns, index_t stride, index_t slices, index_t lead,
                   index_t place_blocks, index_t piece_blocks, index_t row_blocks) {
  constexpr int SUMMERS = SUM_WARPS * GROUPS, OWNER_ROWS = 32 * OWNERS;
  const index_t owners = 1 << bits;
  const int summer = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const index_t each = place_blocks + piece_blocks + row_blocks;
  // embedding_order (embedding_sort.cu) has summed the positions of the first `lead` slices. The last `lead`
  // slices of this grid therefore have no blocks for positions, and their blocks are numbered differently.
  const index_t ahead = slices > lead ? slices - lead : 0;  // slices whose places are left
  index_t slice = blockIdx.x / each, block = blockIdx.x % each;
  if (slice >= ahead) {
    block = blockIdx.x - ahead * each;
    slice = ahead + block / (each - place_blocks);
    block %= each - place_blocks;
  }
  // Blocks of positions are spread evenly among the others: these read memory while those write it.
  const index_t apart = slice < ahead ? each / max(place_blocks, (index_t)1) : 0;
  const bool sums_positions = slice < ahead && block % apart == 0 && block / apart < place_blocks;
  if (sums_positions) block /= apart;
  else if (slice < ahead) block -= min(block / apart + 1, place_blocks);
  const index_t column = ((slice + (sums_positions ? lead : 0)) * LANES + lane) * N;
  const bool inside = column < columns;
  // Lanes past the last column keep running for the warp's shuffles. They read column 0, which is valid
  // memory.
  grad += inside ? column : 0;  // a lane past the last column reads, and writes nothing
  if (sums_positions) {
    const index_t t = block * SUMMERS + summer;
    if (t < places && inside)
      sum_place(grad, dpositions + column, t, (int)batch, length, columns, stride);
  } else if (block < piece_blocks) {
    const int warp = threadIdx.x / 32, mine = summer % GROUPS;
    for (int nth = ((int)block * SUM_WARPS + warp) * GROUPS;; nth += (int)piece_blocks * SUMMERS) {
      int at = -1;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const int one = locate(heads, (int)owners, nth + g, false);
        if (g == 0 && one < 0) return;
        if (g == mine) at = one;
      }
      const int2 piece = at < 0 ? make_int2(0, 0) : pieces[at];
      sum_piece(grad, order, piece, partial + at * columns + column, stride, inside);
    }
  } else {
    // A group has rows of one owner. Past the last row it has none and only runs along with the warp's other
    // group, for the warp's shuffles.
    const index_t first = min(((block - piece_blocks) * SUMMERS + summer) * ROWS, owners * OWNER_ROWS);
    // `from` is ordered by owner; owner o has the table rows o, o + 2^bits, o + 2 * 2^bits, ...
    const index_t row = (first % OWNER_ROWS << bits) + first / OWNER_ROWS;
    const bool some = first < owners * OWNER_ROWS && row < vocabulary;
    const int rows = some ? (int)min((index_t)ROWS, ((vocabulary - 1 - row) >> bits) + 1) : 0;
    const int begins = from[first + min(lane, rows)];
    WEFT_T* to = dweight + row * columns + column;
    sum_rows(grad, order, to, begins, rows, columns << bits, (int)stride, inside);
  }
}

// heads, split_rows: see embedding_sort.cu; partial: (pieces, columns) float32; dweight: (vocabulary,
// columns).
// The blocks of one slice take the split rows in turn. A group adds every ADDERS-th piece, in order; then the
// groups' sums are added.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32, 2)
embedding_merge(const int4* __restrict__ heads, const int4* __restrict__ split_rows,
                const float* __restrict__ partial, WEFT_T* __restrict__ dweight, index_t owners,
                index_t columns, index_t blocks) {
  constexpr int ADDERS = MERGE_WARPS * GROUPS;
  // Stored as [element][lane] (j * LANES + lane): neighbouring lanes write neighbouring words, so that there
  // is no bank conflict whatever N is.
  __shared__ float others[ADDERS][LANES * N];
  const int adder = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const index_t column = (blockIdx.x / blocks * LANES + lane) * N;
  const bool inside = column < columns;
  for (int nth = (int)(blockIdx.x % blocks);; nth += (int)blocks) {
    const int at = locate(heads, (int)owners, nth, true);
    if (at < 0) return;
    const int4 row = split_rows[at];  // which, its first piece, how many
    float sum[N];
    clear(sum);
    for (int k = adder; k < row.z; k += ADDERS * PIECE_LOADS) {
      Floats in[PIECE_LOADS];
#pragma unroll
      for (int u = 0; u < PIECE_LOADS; ++u) {
        const int one = k + u * ADDERS;
        if (inside && one < row.z)
          in[u] = *reinterpret_cast<const Floats*>(partial + (row.y + one) * columns + column);
      }
#pragma unroll
      for (int u = 0; u < PIECE_LOADS; ++u)
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (inside && k + u * ADDERS < row.z) sum[j] += in[u].at[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) others[adder][j * LANES + lane] = sum[j];
    __syncthreads();
    if (adder == 0 && inside) {
#pragma unroll
      for (int w = 1; w < ADDERS; ++w)
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += others[w][j * LANES + lane];
      store(dweight + (index_t)row.x * columns + column, sum);
    }
    // The next split row overwrites `others`.
    __syncthreads();
  }
}
