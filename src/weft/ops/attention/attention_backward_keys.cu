// Attention's backward for the keys: dk and dv of a block of keys, over all queries that see them.
//
// With p, dp, delta and row_terms as in attention_backward_queries.cu, which runs before: dv = p^T grad,
// dk = ds^T q. A block computes 16 MT WARPS keys of one head of keys and reads the queries of all heads of
// its group STEP at a time. Scores are computed transposed, keys by queries: a warp's weights are then the
// first factor of the next product in their registers, and one warp sums each row, in one order. Where SPLIT
// is 2, a block accumulates half of the columns of dk and dv, and two blocks compute the same scores: heads
// above 128 need too many registers otherwise. Bytes: k and v read SPLIT times, dk and dv written once; q and
// grad read once by each block.
#define AHEAD (MT == 2 ? 2 : 4)
#include "attention_tiles.cuh"

namespace {

constexpr int SPLIT_COLUMNS = COLUMNS / SPLIT;
constexpr int TERM_BYTES = STEP * 4;                          // one float for each query of a tile
// Double buffered: two stages are in shared memory beside the block's own k and v.
constexpr int STAGE_BYTES = 2 * STEP_TILE + 2 * TERM_BYTES;  // q, grad and the two terms of their rows

// Start copies of the two terms of STEP queries; row_terms is padded, so that all of them exist.
__device__ __forceinline__ void load_row_terms(unsigned to, const float* row_terms, index_t padded_tq) {
  const int i = threadIdx.x;
  // 2 STEP floats are STEP / 2 chunks of 16 bytes: one for each of the first threads.
  if (i < STEP / 2) {
    const int term = i / (STEP / 4), at = i % (STEP / 4);
    copy_async(to + term * TERM_BYTES + at * 16, row_terms + term * padded_tq + at * 4, 16);
  }
}

// Replace scores by weights 2^(scale s - top). Where `masked`, a query before its key gets 0: `offset` is the
// lane's first query minus its first key.
__device__ __forceinline__ void weigh(Accumulators<STEP>& s, unsigned terms, float scale, bool masked,
                                      int offset) {
#pragma unroll
  for (int x = 0; x < STEP / 8; ++x) {
    float top[2];
    // Scores are transposed: the queries run along the columns of a fragment, and a lane needs the terms of
    // two adjacent queries, 8 bytes at a time.
    shared_load(top, terms + x * 32);
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[y][x][e] = power_of_2(fmaf(s[y][x][e], scale, -top[e % 2]));
        if (masked && y * 16 + e / 2 * 8 > offset + x * 8 + e % 2) s[y][x][e] = 0.0f;
      }
  }
}

// Multiply the weights by (dp - delta): the gradients of the scores.
__device__ __forceinline__ void differentiate(Accumulators<STEP>& s, const Accumulators<STEP>& dp,
                                              unsigned terms) {
#pragma unroll
  for (int x = 0; x < STEP / 8; ++x) {
    float delta[2];
    shared_load(delta, terms + x * 32);
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[y][x][e] *= dp[y][x][e] - delta[e % 2];
  }
}

}  // namespace

// Reads q, k, v, grad, lengths, row_terms (padded_tq: a multiple of STEP); writes dk and dv. Grid: (blocks of
// keys times SPLIT, Hkv, B). Dynamic shared memory: 2 BLOCK_TILE + 2 STAGE_BYTES.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_keys(const __grid_constant__ AttentionArgs args) {
  extern __shared__ __align__(128) unsigned char pool[];
  const unsigned shared = shared_address(pool), buffer = shared + 2 * BLOCK_TILE;
  const int kv_head = blockIdx.y, batch = blockIdx.z, lane = lane_id();
  const int start = blockIdx.x / SPLIT * BLOCK_ROWS;  // under a causal mask the first keys have most queries
  const int column = blockIdx.x % SPLIT * (SPLIT_COLUMNS / 16);  // in units of 16 columns
  const int keys = visible_keys(args.lengths, batch, args.tk);
  const int first = start + warp_row();  // the warp's first key
  // Tiles of queries that see one of these keys, for each head of the group; the heads follow each other.
  const int first_query = args.causal ? start / STEP * STEP : 0;
  // A block whose keys are all past the length reads nothing and writes zeros.
  const int per_head = start < keys ? max(0, ((int)args.tq - first_query + STEP - 1) / STEP) : 0;
  const int tiles = per_head * (int)args.group, first_head = kv_head * (int)args.group;

  int next_query = first_query, next_head = 0;  // of the next tile to request: its first query and its head
  auto load = [&](int i) {
    const unsigned to = buffer + i % 2 * STAGE_BYTES;
    const int head = first_head + next_head, count = (int)args.tq - next_query;
    load_tile<STEP>(to, row_address(args.q, head, next_query), (int)args.q.row_stride, count);
    const T* grad_from = row_address(args.grad, head, next_query);
    load_tile<STEP>(to + STEP_TILE, grad_from, (int)args.grad.row_stride, count);
    const float* terms = args.row_terms + (opaque(blockIdx.z) * args.heads + head) * 2 * args.padded_tq;
    load_row_terms(to + 2 * STEP_TILE, terms + next_query, args.padded_tq);
  };
  if (tiles > 0) {
    const int count = keys - start;
    load_tile<BLOCK_ROWS>(shared, row_address(args.k, kv_head, start), (int)args.k.row_stride, count);
    const T* v_from = row_address(args.v, kv_head, start);
    load_tile<BLOCK_ROWS>(shared + BLOCK_TILE, v_from, (int)args.v.row_stride, count);
    load(0);
  }
  copies_commit();
  Accumulators<SPLIT_COLUMNS> dk_sums = {}, dv_sums = {};

  auto attend = [&](int i, int from, int head, bool masked) {
    const unsigned tile = buffer + i % 2 * STAGE_BYTES, own = shared + warp_row() * ROW_BYTES;
    const unsigned terms = tile + 2 * STEP_TILE + lane % 4 * 8;
    const int query = from + lane % 4 * 2, key = first + lane / 4;
    unsigned long long mask = 0;
    if constexpr (DROPOUT) {
      const DropoutMask dropout = {(unsigned long long)args.seed, args.threshold};
      const index_t head_index = (index_t)batch * args.heads + first_head + head;
      mask = dropout.bits<STEP>((head_index * args.tq + query) * args.tk + key, 1, args.tk);
    }
    Accumulators<STEP> s = {}, dp;
    multiply_transposed<STEP>(s, own, tile);
    weigh(s, terms, args.scale_log2, masked, query - key);
    Fragments<STEP> packed;
    // dv uses the weights with dropout, ds the weights without it: both are needed, so that dp holds the
    // former.
    if constexpr (DROPOUT) apply_dropout<STEP>(dp, s, mask, args.rescale);
    pack<STEP>(packed, DROPOUT ? dp : s);
    multiply_packed<STEP, SPLIT_COLUMNS>(dv_sums, packed, tile + STEP_TILE, column);
    clear<STEP>(dp);
    multiply_transposed<STEP>(dp, own + BLOCK_TILE, tile + STEP_TILE);
    if constexpr (DROPOUT) apply_dropout<STEP>(dp, dp, mask, args.rescale);
    differentiate(s, dp, terms + TERM_BYTES);
    pack<STEP>(packed, s);
    multiply_packed<STEP, SPLIT_COLUMNS>(dk_sums, packed, tile, column);
  };

  for (int i = 0; i < tiles; ++i) {
    copies_wait<0>();
    __syncthreads();  // tile i is complete for all threads, and no warp still reads the other buffer
    const int from = next_query, head = next_head;
    next_query += STEP;
    // The pipeline runs on across heads: the first tile of the next head is requested during the last of this
    // one.
    if (next_query >= args.tq) next_query = first_query, ++next_head;
    if (i + 1 < tiles) load(i + 1);
    copies_commit();
    // Queries before the warp's first key see none of its keys; from its last key on they need no mask.
    if (!args.causal || from >= first + WARP_ROWS - 1) attend(i, from, head, false);
    else if (from + STEP > first) attend(i, from, head, true);
  }

#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < SPLIT_COLUMNS / 8; ++x)
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // a key past the length has no gradient, whatever was summed for it
        const bool visible = first + y * 16 + e / 2 * 8 + lane / 4 < keys;
        dk_sums[y][x][e] = visible ? dk_sums[y][x][e] * args.scale : 0.0f;
        dv_sums[y][x][e] = visible ? dv_sums[y][x][e] : 0.0f;
      }
  T* dk = args.dk.data + batch * args.dk.batch_stride + kv_head * args.dk.head_stride;
  T* dv = args.dv.data + batch * args.dv.batch_stride + kv_head * args.dv.head_stride;
  store_rows<SPLIT_COLUMNS>(dk_sums, shared, dk, args.dk.row_stride, start, (int)args.tk, column * 2);
  store_rows<SPLIT_COLUMNS>(dv_sums, shared + BLOCK_TILE, dv, args.dv.row_stride, start, (int)args.tk,
                            column * 2);
}
