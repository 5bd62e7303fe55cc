// First of two kernels that sort tokens by id: each block partitions its share of the tokens by owner.
//
// An owner is a block of embedding_sort.cu. It has every 2^bits-th row of the table, OWNER_ROWS at most:
// frequent ids are neighbours in a vocabulary, and this spreads them over many owners. Each warp of a block
// takes a share of its tokens, in order, and counts them for each owner; the prefix sums of the counts give
// each token its offset. The result does not depend on the order of the atomics. An owner then reads only its
// own tokens. Bytes: an id read twice and an int written for each token, an int2 for each block and owner.
#include "sort.cuh"
#include "overlap.cuh"

constexpr int BUCKET_WARPS = 16;
constexpr int AT_ONCE = 256;  // owners counted in one pass over the ids; more owners take more passes

// ids: (tokens,). bucket_tokens: (tokens,), each block's `share` (at most 2^OFFSET) of tokens, sorted by
// owner and stable: a token is its row among its owner's rows and its position in the share. heads: (owners,
// blocks), where an owner's tokens begin in a block's share, and their number. Ids that name no row are left
// out.
extern "C" __global__ void __launch_bounds__(BUCKET_WARPS * 32, 1)
embedding_buckets(const index_t* __restrict__ ids, int* __restrict__ bucket_tokens,
                  int2* __restrict__ heads, index_t tokens, index_t vocabulary, index_t bits,
                  index_t share, index_t blocks) {
  // 16 x 256 counters are 16 KiB: within the 48 KiB of static shared memory, and no launch attribute is
  // needed.
  __shared__ int count[BUCKET_WARPS][AT_ONCE];
  __shared__ int scratch[BUCKET_WARPS];
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, owners = 1 << bits;
  const index_t first = (index_t)blockIdx.x * share, last = min(first + share, tokens);
  const index_t each = (share + BUCKET_WARPS * 32 - 1) / (BUCKET_WARPS * 32) * 32;
  const index_t begin = min(first + warp * each, last), end = min(begin + each, last);
  int done = 0;  // tokens of the owners of earlier passes
  for (int low = 0; low < owners; low += AT_ONCE) {
    const int some = min(AT_ONCE, owners - low);
    for (int i = lane; i < AT_ONCE; i += 32) count[warp][i] = 0;
    __syncwarp();
    for (index_t at = begin; at < end; at += 32) {
      const index_t id = at + lane < end ? ids[at + lane] : -1;
      // The owner's number within this pass. For an id out of range it is meaningless and is masked out.
      const int of = (int)(id & (owners - 1)) - low;
      if (id >= 0 && id < vocabulary && of >= 0 && of < some) atomicAdd(&count[warp][of], 1);
    }
    __syncthreads();
    int mine = 0;
    // One thread for each owner of the pass: an exclusive sum over the warps, in their order, keeps the sort
    // stable.
    if (threadIdx.x < some) {
#pragma unroll 8
      for (int w = 0; w < BUCKET_WARPS; ++w) {
        const int row_index = count[w][threadIdx.x];
        count[w][threadIdx.x] = mine;
        mine += row_index;
      }
    }
    int whole;
    const int start = done + block_exclusive_sum<BUCKET_WARPS>(mine, scratch, whole);
    if (threadIdx.x < some) {
      // Stored by owner, so that embedding_order reads its runs as consecutive int2.
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
      // `row` takes the upper ten bits of the int and the position in the share the lower OFFSET bits.
      scatter_stable(bucket_tokens + first, count[warp], known ? of : -1, row | (int)(at + lane - first));
    }
    done += whole;
    __syncthreads();
  }
}
