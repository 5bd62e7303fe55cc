// Embedding and its gradients: a warp moves 32 accesses of N elements of a row at a time.
//
// Backward: columns go slice by slice, so that each element of the gradient, which its place's row
// and its token's both ask for, comes from memory once and then from L2: its places' sums are made
// `lead` slices ahead of its tokens'. Sums are in float, in a fixed order. Bytes: forward, the rows
// that are asked for, positions, the answer; backward, the gradient and both answers, each row of
// which is written once, zeros too.
#include "rows.cuh"

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
constexpr int PARTS = 4;  // of a row's pieces that a merging warp has under way together
#ifndef FLIGHT_TOKENS
#define FLIGHT_TOKENS 5
#endif
#ifndef RESIDENT
#define RESIDENT 3
#endif
constexpr int TOKENS = FLIGHT_TOKENS;  // of a group's rows that are under way together, up to 16
static_assert(32 * OWNERS % ROWS == 0, "a group's rows are one owner's");
static_assert(ROWS < LANES, "a lane for each row's begin, and one for the end");

// weight: (vocabulary, columns), ids: (batch, length), positions: (>= length, columns) or null; y:
// (batch, length, columns). A warp has one place of SEQUENCES sequences.
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
  index_t id[SEQUENCES];
#pragma unroll
  for (int q = 0; q < SEQUENCES; ++q)
    id[q] = first + q < batch ? ids[(first + q) * length + t] : -1;
  float none[N];
#pragma unroll
  for (int j = 0; j < N; ++j) none[j] = __int_as_float(0x7fc00000);
  Pack row[SEQUENCES];
#pragma unroll
  for (int q = 0; q < SEQUENCES; ++q) {
    row[q] = packed(none);
    if (id[q] >= 0 && id[q] < vocabulary) row[q] = load(weight + id[q] * weight_stride + column);
  }
  float place[N] = {};
  if (positions) add(place, load(positions + t * positions_stride + column));
#pragma unroll
  for (int q = 0; q < SEQUENCES; ++q) {
    if (first + q >= batch) break;
    float sum[N];
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = place[j];
    add(sum, row[q]);
    store(y + ((first + q) * length + t) * columns + column, sum);
  }
}

// A row of the gradient that is not asked for again.
__device__ __forceinline__ Pack load_last(const WEFT_T* from) {
  return LAST ? Streamed<sizeof(Pack)>::load(from) : load(from);
}

// What a group's lane `i` has, of a lane's own `v`; all lanes of a warp ask together.
__device__ __forceinline__ int of_lane(int v, int i) { return __shfl_sync(ALL, v, i, LANES); }

// Rows 0, apart, ... below rows * apart at `to`; the q-th's tokens are order[begins, begins of the
// lane after) in lane q. Those of more than PIECE tokens are left out; others are written, TOKENS
// of their tokens are under way. A warp's groups go in step: each has its own rows.
__device__ __forceinline__ void sum_rows(const WEFT_T* grad, const int* order, WEFT_T* to,
                                         int begins, int rows, index_t apart, int stride,
                                         bool inside) {
  const int lane = threadIdx.x % LANES, shift = threadIdx.x % 32 / LANES * LANES;
  const int next = __shfl_down_sync(ALL, begins, 1, LANES);
  const bool much = lane < rows && next - begins > PIECE;
  const unsigned left_out = __ballot_sync(ALL, much) >> shift;
  const int mine = lane < rows && !much ? next - begins : 0;
  int upto = mine;
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) {
    const int other = __shfl_up_sync(ALL, upto, step, LANES);
    if (lane >= step) upto += other;
  }
  const int before = upto - mine, skip = begins - before;
  const int all = of_lane(upto, LANES - 1);
  int most = all;
  if (GROUPS > 1) most = max(most, __shfl_xor_sync(ALL, all, LANES % 32));
  float sum[N];
  clear(sum);
  int q = 0;
  for (int at = 0; at < most; at += LANES) {
    int its = 0;  // the row of token at + lane: the last that begins there or before
#pragma unroll
    for (int r = 1; r < ROWS; ++r) {
      const int where = of_lane(before, r);
      its += r < rows && where <= at + lane;
    }
    const int place = of_lane(skip, its) + at + lane;
    const int token = at + lane < all ? order[place] : 0;
    const int left = min(all - at, LANES), steps = min(most - at, LANES);
    Pack in[TOKENS];
#pragma unroll
    for (int u = 0; u < TOKENS; ++u) {
      const int one = of_lane(token, u);
      if (u < left) in[u] = load_last(grad + (index_t)one * stride);
    }
#pragma unroll 1
    for (int k = 0; k < steps; k += TOKENS) {
#pragma unroll
      for (int u = 0; u < TOKENS; ++u) {  // as one is added another is asked for
        const int row = of_lane(its, (k + u) % LANES);
        const int one = of_lane(token, (k + u + TOKENS) % LANES);
        if (k + u >= left) continue;
        for (; q < row; ++q) {
          if (inside && !(left_out >> q & 1)) store(to + q * apart, sum);
          clear(sum);
        }
        add(sum, in[u]);
        if (k + u + TOKENS < left) in[u] = load_last(grad + (index_t)one * stride);
      }
    }
  }
  for (; q < rows; ++q) {
    if (inside && !(left_out >> q & 1)) store(to + q * apart, sum);
    clear(sum);
  }
}

// The `nth` of all that the owners found, pieces or rows of many tokens: where it stands; -1 past
// the last. All lanes of a warp ask together, each of SIDE owners in a row.
__device__ __forceinline__ int locate(const int4* heads, int owners, int nth, bool rows) {
  constexpr int SIDE = 4;
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < owners; first += 32 * SIDE) {
    int from[SIDE], its[SIDE], upto = 0;
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      const int owner = first + lane * SIDE + i;
      const int4 head = owner < owners ? heads[owner] : make_int4(0, 0, 0, 0);
      from[i] = rows ? head.z : head.x, its[i] = rows ? head.w : head.y;
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
    if (past) return __shfl_sync(ALL, at, __ffs(past) - 1);
    nth -= __shfl_sync(ALL, upto, 31);
  }
  return -1;
}

// What one piece of the order has of its row, of none for a group whose piece is empty.
__device__ __forceinline__ void sum_piece(const WEFT_T* grad, const int* order, int2 piece,
                                          float* to, index_t stride, bool inside) {
  const int lane = threadIdx.x % LANES;
  float sum[N];
  clear(sum);
#pragma unroll 1
  for (int first = 0; first < PIECE; first += LANES) {
    const int left = min(piece.y - piece.x - first, LANES);
    const int token = lane < left ? order[piece.x + first + lane] : 0;
    for (int k = 0; k < min(PIECE, LANES); k += FLIGHT) {
      Pack in[FLIGHT];
#pragma unroll
      for (int u = 0; u < FLIGHT; ++u) {
        const int one = of_lane(token, (k + u) % LANES);
        if (k + u < left) in[u] = load_last(grad + (index_t)one * stride);
      }
#pragma unroll
      for (int u = 0; u < FLIGHT; ++u)
        if (k + u < left) add(sum, in[u]);
    }
  }
  Floats out;
#pragma unroll
  for (int j = 0; j < N; ++j) out.at[j] = sum[j];
  if (inside && piece.y > piece.x) *reinterpret_cast<Floats*>(to) = out;
}

// grad: (batch * length, columns), rows `stride` apart; from, order, heads, pieces: see order.cu.
// dweight: (vocabulary, columns); dpositions: (places, columns); partial: a float row for each
// piece. Slice by slice, blocks of pieces, of the rows that PIECE tokens or fewer ask for, and
// among them of places (of the slice `lead` further on, while there is one): a group has every so
// many-th piece, ROWS rows, or a place.
extern "C" __global__ void __launch_bounds__(SUM_WARPS * 32, RESIDENT)
embedding_backward(const WEFT_T* __restrict__ grad, const int* __restrict__ from,
                   const int* __restrict__ order, const int4* __restrict__ heads,
                   const int2* __restrict__ pieces, WEFT_T* __restrict__ dweight,
                   WEFT_T* __restrict__ dpositions, float* __restrict__ partial,
                   index_t vocabulary, index_t bits, index_t places, index_t batch,
                   index_t length, index_t columns, index_t stride, index_t slices, index_t lead,
                   index_t place_blocks, index_t piece_blocks, index_t row_blocks) {
  constexpr int SUMMERS = SUM_WARPS * GROUPS, OWN = 32 * OWNERS;
  const index_t owners = 1 << bits;
  const int summer = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const index_t each = place_blocks + piece_blocks + row_blocks;
  const index_t ahead = slices > lead ? slices - lead : 0;  // slices whose places are left
  index_t slice = blockIdx.x / each, block = blockIdx.x % each;
  if (slice >= ahead) {
    block = blockIdx.x - ahead * each;
    slice = ahead + block / (each - place_blocks);
    block %= each - place_blocks;
  }
  // Places' blocks stand evenly among the others: memory is read by those, written by these.
  const index_t apart = slice < ahead ? each / max(place_blocks, (index_t)1) : 0;
  const bool place = slice < ahead && block % apart == 0 && block / apart < place_blocks;
  if (place) block /= apart;
  else if (slice < ahead) block -= min(block / apart + 1, place_blocks);
  const index_t column = ((slice + (place ? lead : 0)) * LANES + lane) * N;
  const bool inside = column < columns;
  grad += inside ? column : 0;  // a lane past the last column reads, and writes nothing
  if (place) {
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
    // A group has rows of one owner; past its last there are none, and it goes along with its
    // warp's other.
    const index_t first = min(((block - piece_blocks) * SUMMERS + summer) * ROWS, owners * OWN);
    const index_t row = (first % OWN << bits) + first / OWN;
    const bool some = first < owners * OWN && row < vocabulary;
    const int rows = some ? (int)min((index_t)ROWS, ((vocabulary - 1 - row) >> bits) + 1) : 0;
    const int begins = from[first + min(lane, rows)];
    WEFT_T* to = dweight + row * columns + column;
    sum_rows(grad, order, to, begins, rows, columns << bits, (int)stride, inside);
  }
}

// Blocks of one slice take the rows of many tokens in turn: every ADDERS-th piece is added by one
// group, in order, then the groups' sums are.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32, 2)
embedding_merge(const int4* __restrict__ heads, const int4* __restrict__ many,
                const float* __restrict__ partial, WEFT_T* __restrict__ dweight, index_t owners,
                index_t columns, index_t blocks) {
  constexpr int ADDERS = MERGE_WARPS * GROUPS;
  __shared__ float others[ADDERS][LANES * N];
  const int adder = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const index_t column = (blockIdx.x / blocks * LANES + lane) * N;
  const bool inside = column < columns;
  for (int nth = (int)(blockIdx.x % blocks);; nth += (int)blocks) {
    const int at = locate(heads, (int)owners, nth, true);
    if (at < 0) return;
    const int4 row = many[at];  // which, its first piece, how many
    float sum[N];
    clear(sum);
    for (int k = adder; k < row.z; k += ADDERS * PARTS) {
      Floats in[PARTS];
#pragma unroll
      for (int u = 0; u < PARTS; ++u) {
        const int one = k + u * ADDERS;
        if (inside && one < row.z)
          in[u] = *reinterpret_cast<const Floats*>(partial + (row.y + one) * columns + column);
      }
#pragma unroll
      for (int u = 0; u < PARTS; ++u)
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
    __syncthreads();
  }
}
