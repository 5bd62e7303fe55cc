// The tokens in the order of their ids, and of their places among equal ids: a counting sort.
//
// Counts are added with atomics, whose sums do not depend on their order; what they hand out within
// one id does, and is put right at the end: by counting smaller places where few tokens ask for a
// row, by a bitmap of all places where many do. An id that names no row has no place in the order.
// Bytes: the ids and a few words a token and a row, all of it in L2.
#include "numeric.cuh"

#ifndef PIECE
#define PIECE 32
#endif
constexpr int WINDOW = 8192;  // words of a bitmap: places looked at together, divided by 32
constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ int row_of(const index_t* ids, index_t token, index_t tokens,
                                      index_t vocabulary) {
  if (token >= tokens) return -1;
  const index_t id = ids[token];
  return id >= 0 && id < vocabulary ? (int)id : -1;
}

// Exclusive sum over the block's threads; `whole` gets the block's total.
__device__ __forceinline__ int before(int mine, int* scratch, int& whole) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int upto = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  int sums = lane < warps ? scratch[lane] : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, sums, step);
    if (lane >= step) sums += other;
  }
  whole = __shfl_sync(ALL, sums, 31);
  const int earlier = __shfl_sync(ALL, sums, max(warp - 1, 0));
  __syncthreads();
  return (warp ? earlier : 0) + upto - mine;
}

// counts: (vocabulary,) zeros; slot: (tokens,), a token's number among those of its id, by arrival.
// Equal ids of a warp arrive together.
extern "C" __global__ void __launch_bounds__(256)
embedding_count(const index_t* __restrict__ ids, int* __restrict__ counts, int* __restrict__ slot,
                index_t tokens, index_t vocabulary) {
  const index_t token = (index_t)blockIdx.x * 256 + threadIdx.x;
  const int row = row_of(ids, token, tokens, vocabulary), lane = threadIdx.x % 32;
  const unsigned equal = __match_any_sync(ALL, row);
  const int first = __ffs(equal) - 1;
  int base = 0;
  if (row >= 0 && lane == first) base = atomicAdd(&counts[row], __popc(equal));
  base = __shfl_sync(ALL, base, first);
  if (row >= 0) slot[token] = base + __popc(equal & ((1u << lane) - 1));
}

// segment: (vocabulary,) where each row's tokens begin and how many there are. A block has 1024
// rows and adds up all counts before them itself, from L2: no block waits for another. asked[0]
// gets the number of tokens that name a row, asked[1] (zero before) that of the rows in `many`,
// which more than PIECE tokens ask for.
extern "C" __global__ void __launch_bounds__(1024)
embedding_segments(const int* __restrict__ counts, int2* __restrict__ segment,
                   int* __restrict__ asked, int* __restrict__ many, index_t vocabulary) {
  __shared__ int scratch[32];
  const index_t start = (index_t)blockIdx.x * 1024, row = start + threadIdx.x;
  int earlier = 0, base, whole;
  for (index_t i = threadIdx.x; i < start / 4; i += 1024) {
    const int4 four = reinterpret_cast<const int4*>(counts)[i];
    earlier += four.x + four.y + four.z + four.w;
  }
  before(earlier, scratch, base);
  const int mine = row < vocabulary ? counts[row] : 0;
  const int from = base + before(mine, scratch, whole);
  if (row < vocabulary) segment[row] = make_int2(from, mine);
  if (row == vocabulary - 1) asked[0] = from + mine;
  if (mine > PIECE) many[atomicAdd(&asked[1], 1)] = (int)row;
}

// loose: (tokens,), each row's tokens together, by arrival.
extern "C" __global__ void __launch_bounds__(256)
embedding_scatter(const index_t* __restrict__ ids, const int* __restrict__ slot,
                  const int2* __restrict__ segment, int* __restrict__ loose, index_t tokens,
                  index_t vocabulary) {
  const index_t token = (index_t)blockIdx.x * 256 + threadIdx.x;
  const int row = row_of(ids, token, tokens, vocabulary);
  if (row >= 0) loose[segment[row].x + slot[token]] = (int)token;
}

// One row's tokens in their order: a bit for each place, then the bits read from the first to the
// last, WINDOW words at a time.
__device__ void order_many(const int* loose, int* order, int2 mine, index_t tokens,
                           unsigned* bits, int* scratch) {
  int done = 0;
  for (index_t window = 0; window < tokens; window += (index_t)WINDOW * 32) {
    const index_t left = (tokens - window + 31) / 32;
    const int words = left < WINDOW ? (int)left : WINDOW;
    for (int i = threadIdx.x; i < words; i += blockDim.x) bits[i] = 0;
    __syncthreads();
    for (int k = threadIdx.x; k < mine.y; k += blockDim.x) {
      const index_t place = loose[mine.x + k] - window;
      if (place >= 0 && place < (index_t)words * 32)
        atomicOr(&bits[place / 32], 1u << (place % 32));
    }
    __syncthreads();
    const int each = (words + blockDim.x - 1) / blockDim.x;
    const int from = min((int)threadIdx.x * each, words), to = min(from + each, words);
    int here = 0, whole;
    for (int i = from; i < to; ++i) here += __popc(bits[i]);
    int at = mine.x + done + before(here, scratch, whole);
    for (int i = from; i < to; ++i)
      for (unsigned rest = bits[i]; rest; rest &= rest - 1)
        order[at++] = (int)(window + i * 32 + __ffs(rest) - 1);
    done += whole;
    __syncthreads();
  }
}

// order: (tokens,), each row's tokens by their places. The first `blocks` blocks take the rows of
// `many`, the others a token a thread.
extern "C" __global__ void __launch_bounds__(256)
embedding_order(const index_t* __restrict__ ids, const int* __restrict__ loose,
                const int2* __restrict__ segment, const int* __restrict__ asked,
                const int* __restrict__ many, int* __restrict__ order, index_t tokens,
                index_t vocabulary, index_t blocks) {
  __shared__ unsigned bits[WINDOW];
  __shared__ int scratch[32];
  if (blockIdx.x < blocks) {
    for (int i = blockIdx.x; i < asked[1]; i += (int)blocks)
      order_many(loose, order, segment[many[i]], tokens, bits, scratch);
    return;
  }
  const index_t token = ((index_t)blockIdx.x - blocks) * 256 + threadIdx.x;
  const int row = row_of(ids, token, tokens, vocabulary);
  if (row < 0) return;
  const int2 mine = segment[row];
  if (mine.y > PIECE) return;
  int earlier = 0;
  for (int k = 0; k < mine.y; ++k) earlier += loose[mine.x + k] < (int)token;
  order[mine.x + earlier] = (int)token;
}
