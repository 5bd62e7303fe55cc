// Embedding and its gradients: a warp moves 32 accesses of ACCESS elements of a row at a time.
//
// Backward: all warps of one slice of 32 * ACCESS columns stand side by side in the grid, so that
// each element of the gradient, which its token's row and its position's both ask for, comes from
// memory once and then from L2. Sums are in float, in a fixed order. Bytes: forward, the rows that
// are asked for, positions, the answer; backward, the gradient and both answers, each row of which
// is written once, zeros too.
#include "numeric.cuh"

#ifndef ACCESS
#define ACCESS (16 / sizeof(WEFT_T))
#endif
#ifndef PIECE
#define PIECE 32
#endif
constexpr int N = ACCESS;
constexpr int WARPS = 4, ROWS = 4, SEQUENCES = 4;
using Floats = Vector<float, N>;

// An access as it travels, in words: elements of two bytes would each take a register in flight.
constexpr int BYTES = N * sizeof(WEFT_T), WORDS = BYTES < 4 ? 1 : BYTES / 4;
constexpr int E = N / WORDS;
template <int BYTES> struct Word { using type = unsigned; };
template <> struct Word<2> { using type = unsigned short; };
struct alignas(BYTES) Pack {
  Word<BYTES>::type word[WORDS];
};

// An answer is not read again here: it should not push out of L2 what is.
template <int BYTES> struct Streamed {
  static __device__ __forceinline__ void store(WEFT_T* to, const Pack& p) {
    *reinterpret_cast<Pack*>(to) = p;
  }
};
template <> struct Streamed<16> {
  static __device__ __forceinline__ void store(WEFT_T* to, const Pack& p) {
    __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&p));
  }
};

__device__ __forceinline__ Pack load(const WEFT_T* from) {
  return *reinterpret_cast<const Pack*>(from);
}

__device__ __forceinline__ void add(float (&sum)[N], const Pack& p) {
#pragma unroll
  for (int k = 0; k < WORDS; ++k) {
    WEFT_T at[E];
    memcpy(at, &p.word[k], sizeof(at));
#pragma unroll
    for (int j = 0; j < E; ++j) sum[k * E + j] += to_float(at[j]);
  }
}

__device__ __forceinline__ Pack packed(const float (&sum)[N]) {
  Pack p;
#pragma unroll
  for (int k = 0; k < WORDS; ++k) {
    WEFT_T at[E];
#pragma unroll
    for (int j = 0; j < E; ++j) at[j] = from_float<WEFT_T>(sum[k * E + j]);
    memcpy(&p.word[k], at, sizeof(at));
  }
  return p;
}

__device__ __forceinline__ void store(WEFT_T* to, const float (&sum)[N]) {
  Streamed<sizeof(Pack)>::store(to, packed(sum));
}

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

// Rows token(k) of the gradient for k in [from, to), in that order, eight in flight.
template <typename Token>
__device__ __forceinline__ void gather(float (&sum)[N], const WEFT_T* grad, index_t stride,
                                       int from, int to, Token token) {
  constexpr int FLIGHT = 8;
  for (int k = from; k < to; k += FLIGHT) {
    Pack in[FLIGHT];
#pragma unroll
    for (int u = 0; u < FLIGHT; ++u)
      if (k + u < to) in[u] = load(grad + token(k + u) * stride);
#pragma unroll
    for (int u = 0; u < FLIGHT; ++u)
      if (k + u < to) add(sum, in[u]);
  }
}

// ROWS rows of dweight that PIECE tokens or fewer ask for, two tokens of each in flight.
__device__ __forceinline__ void sum_rows(const WEFT_T* grad, const int* order,
                                         const int2* segment, WEFT_T* to, index_t row,
                                         index_t vocabulary, index_t columns, index_t stride) {
  int at[ROWS], left[ROWS], most = 0;
  unsigned own = 0;
#pragma unroll
  for (int q = 0; q < ROWS; ++q) {
    const int2 mine = row + q < vocabulary ? segment[row + q] : make_int2(0, PIECE + 1);
    const bool few = mine.y <= PIECE;
    at[q] = mine.x, left[q] = few ? mine.y : 0;
    own |= (unsigned)few << q;
    most = max(most, left[q]);
  }
  to += row * columns;
  float sum[ROWS][N] = {};
  for (int k = 0; k < most; k += 2) {
    Pack in[ROWS][2];
#pragma unroll
    for (int q = 0; q < ROWS; ++q)
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        in[q][u] = Pack{};  // zeros, whatever the type
        if (k + u < left[q]) in[q][u] = load(grad + order[at[q] + k + u] * stride);
      }
#pragma unroll
    for (int q = 0; q < ROWS; ++q)
#pragma unroll
      for (int u = 0; u < 2; ++u) add(sum[q], in[q][u]);
  }
#pragma unroll
  for (int q = 0; q < ROWS; ++q)
    if (own >> q & 1) store(to + q * columns, sum[q]);
}

// What places [begin, end) of the order have of one row that more than PIECE tokens ask for.
__device__ __forceinline__ void sum_part(const WEFT_T* grad, const int* order, int2 mine,
                                         float* to, int begin, int end, index_t stride) {
  if (mine.y <= PIECE) return;
  float sum[N] = {};
  gather(sum, grad, stride, max(mine.x, begin), min(mine.x + mine.y, end),
         [order](int k) { return (index_t)order[k]; });
  Floats out;
#pragma unroll
  for (int j = 0; j < N; ++j) out.at[j] = sum[j];
  *reinterpret_cast<Floats*>(to) = out;
}

// grad: (batch * length, columns), rows `stride` apart; order, segment, asked: see order.cu.
// dweight: (vocabulary, columns); dpositions: (places, columns); partial: (2 * pieces, columns), a
// piece being PIECE places of the order: what it has of its first row, and of its last. A slice is
// place_blocks, piece_blocks, row_blocks blocks; a warp has one position, piece, or ROWS rows.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 5)
embedding_backward(const WEFT_T* __restrict__ grad, const index_t* __restrict__ ids,
                   const int* __restrict__ order, const int2* __restrict__ segment,
                   const int* __restrict__ asked, WEFT_T* __restrict__ dweight,
                   WEFT_T* __restrict__ dpositions, float* __restrict__ partial,
                   index_t vocabulary, index_t places, index_t batch, index_t length,
                   index_t columns, index_t stride, index_t place_blocks, index_t piece_blocks,
                   index_t row_blocks) {
  const index_t each = place_blocks + piece_blocks + row_blocks;
  const index_t column = (blockIdx.x / each * 32 + threadIdx.x % 32) * N;
  index_t block = blockIdx.x % each;
  if (column >= columns) return;
  grad += column;
  const int warp = threadIdx.x / 32;
  if (block < place_blocks) {
    const index_t t = block * WARPS + warp;
    if (t >= places) return;
    float sum[N] = {};
    gather(sum, grad, stride, 0, t < length ? (int)batch : 0,
           [length, t](int b) { return b * length + t; });
    store(dpositions + t * columns + column, sum);
  } else if ((block -= place_blocks) < piece_blocks) {
    const index_t piece = block * WARPS + warp;
    const int begin = (int)min(piece * PIECE, (index_t)asked[0]);
    const int end = min(begin + PIECE, asked[0]);
    if (begin == end) return;
    const index_t head = ids[order[begin]], tail = ids[order[end - 1]];
    float* to = partial + 2 * piece * columns + column;
    sum_part(grad, order, segment[head], to, begin, end, stride);
    if (tail != head) sum_part(grad, order, segment[tail], to + columns, begin, end, stride);
  } else {
    const index_t row = ((block - piece_blocks) * WARPS + warp) * ROWS;
    sum_rows(grad, order, segment, dweight + column, row, vocabulary, columns, stride);
  }
}

// A block a piece and slice, 8 warps: if a row of many tokens begins in this piece, which then is
// the row of its last token, its partial sums are added: every eighth by one warp, then the warps'.
extern "C" __global__ void __launch_bounds__(256)
embedding_merge(const index_t* __restrict__ ids, const int* __restrict__ order,
                const int2* __restrict__ segment, const int* __restrict__ asked,
                const float* __restrict__ partial, WEFT_T* __restrict__ dweight, index_t columns,
                index_t pieces) {
  __shared__ float others[8][32 * N];
  const int piece = (int)(blockIdx.x % pieces), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t column = (blockIdx.x / pieces * 32 + lane) * N;
  const int begin = piece * PIECE, end = min(begin + PIECE, asked[0]);
  if (begin >= end) return;
  const index_t row = ids[order[end - 1]];
  const int2 mine = segment[row];
  if (mine.y <= PIECE || mine.x < begin) return;
  const int last = (mine.x + mine.y - 1) / PIECE;
  float sum[N] = {};
  if (column < columns) {
#pragma unroll 2
    for (int at = piece + warp; at <= last; at += 8) {
      // The row's tokens are the last ones of its first piece, and the first ones of the others.
      const index_t slot = 2 * (index_t)at + (at == piece && mine.x > begin);
      const Floats in = *reinterpret_cast<const Floats*>(partial + slot * columns + column);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += in.at[j];
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) others[warp][j * 32 + lane] = sum[j];
  __syncthreads();
  if (warp || column >= columns) return;
#pragma unroll
  for (int w = 1; w < 8; ++w)
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += others[w][j * 32 + lane];
  store(dweight + row * columns + column, sum);
}
