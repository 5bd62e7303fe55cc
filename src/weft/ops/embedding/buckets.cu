// The first of two steps that order tokens by id: each block sorts its share of them by owner.
//
// An owner has every 2^bits-th row of the table, OWN at most (see order.cu): rows that are often
// asked for stand together, and come to many. A block's warps have shares of its tokens, in
// order, and counts of their own for each owner, whose sums say where each token belongs among the
// block's: no atomic's order shows. Then an owner has few tokens to look at, not all of them.
// Bytes: an id read twice and an int written for each token, an int2 for each block and owner.
#include "order.cuh"
#include "overlap.cuh"

constexpr int BUCKET_WARPS = 16;
constexpr int AT_ONCE = 256;  // owners that are counted together; if there are more, it looks again

// ids: (tokens,). found: (tokens,), a block's `share` (at most 2^OFFSET) tokens by owner and then
// by place: the row among its owner's, and the place in the share. heads: (owners, blocks), where
// an owner's begin in a block's found, and how many. Ids that name no row are not found.
extern "C" __global__ void __launch_bounds__(BUCKET_WARPS * 32, 1)
embedding_buckets(const index_t* __restrict__ ids, int* __restrict__ found,
                  int2* __restrict__ heads, index_t tokens, index_t vocabulary, index_t bits,
                  index_t share, index_t blocks) {
  __shared__ int count[BUCKET_WARPS][AT_ONCE];
  __shared__ int scratch[BUCKET_WARPS];
  let_next_begin();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, owners = 1 << bits;
  const index_t first = (index_t)blockIdx.x * share, last = min(first + share, tokens);
  const index_t each = (share + BUCKET_WARPS * 32 - 1) / (BUCKET_WARPS * 32) * 32;
  const index_t begin = min(first + warp * each, last), end = min(begin + each, last);
  int done = 0;  // tokens of the owners before
  for (int low = 0; low < owners; low += AT_ONCE) {
    const int some = min(AT_ONCE, owners - low);
    for (int i = lane; i < AT_ONCE; i += 32) count[warp][i] = 0;
    __syncwarp();
    for (index_t at = begin; at < end; at += 32) {
      const index_t id = at + lane < end ? ids[at + lane] : -1;
      const int of = (int)(id & (owners - 1)) - low;
      if (id >= 0 && id < vocabulary && of >= 0 && of < some) atomicAdd(&count[warp][of], 1);
    }
    __syncthreads();
    int mine = 0;
    if (threadIdx.x < some) {
#pragma unroll 8
      for (int w = 0; w < BUCKET_WARPS; ++w) {
        const int its = count[w][threadIdx.x];
        count[w][threadIdx.x] = mine;
        mine += its;
      }
    }
    int whole;
    const int start = done + before<BUCKET_WARPS>(mine, scratch, whole);
    if (threadIdx.x < some) {
      heads[((index_t)low + threadIdx.x) * blocks + blockIdx.x] = make_int2(start, mine);
#pragma unroll 8
      for (int w = 0; w < BUCKET_WARPS; ++w) count[w][threadIdx.x] += start;
    }
    __syncthreads();
    for (index_t at = begin; at < end; at += 32) {
      const index_t id = at + lane < end ? ids[at + lane] : -1;
      const int of = (int)(id & (owners - 1)) - low;
      const bool known = id >= 0 && id < vocabulary && of >= 0 && of < some;
      const int row = (int)(id >> bits) << OFFSET;
      put(found + first, count[warp], known ? of : -1, row | (int)(at + lane - first));
    }
    done += whole;
    __syncthreads();
  }
}
