// Attention's backward toward the keys: dk and dv of a block of keys, over all that see them.
//
// With p, dp and delta as in attention_queries.cu, which runs before: dv = p^T grad, dk = ds^T q. A
// block owns 16 MT WARPS keys of one head of keys and walks the queries of all its heads STEP at a
// time. Scores are made turned round, keys by queries, so that a warp's weights are the next
// product's first factor in their registers, and each sum is one warp's, in one order. Where SPLIT
// is 2 a block keeps the half of the columns of dk and dv, and two make the same scores: heads
// above 128 have no room for more. Bytes: k and v read SPLIT times, dk and dv written once; q and
// grad read once a block.
#define AHEAD (MT == 2 ? 2 : 4)
#include "attention_tiles.cuh"

namespace {

constexpr int KEPT_COLUMNS = COLUMNS / SPLIT;
constexpr int TWO = STEP * 4, STAGE = 2 * WALKED + 2 * TWO;  // bytes: q, grad, and two numbers

// Ask for the two numbers of STEP queries: lines of them are padded, so that all are there.
__device__ __forceinline__ void ask_numbers(unsigned to, const float* rows, index_t whole) {
  const int i = threadIdx.x;
  if (i < STEP / 2) {
    const int line = i / (STEP / 4), at = i % (STEP / 4);
    copy_async(to + line * TWO + at * 16, rows + line * whole + at * 4, 16);
  }
}

// Scores to weights, 2^(scale s - top); where `masked`, 0 for a query before its key: `ahead` is
// how far the lane's first query lies past its first key.
__device__ __forceinline__ void weigh(Sums<STEP>& s, unsigned numbers, float scale, bool masked,
                                      int ahead) {
#pragma unroll
  for (int x = 0; x < STEP / 8; ++x) {
    float top[2];
    shared_load(top, numbers + x * 32);
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[y][x][e] = power_of_2(fmaf(s[y][x][e], scale, -top[e % 2]));
        if (masked && y * 16 + e / 2 * 8 > ahead + x * 8 + e % 2) s[y][x][e] = 0.0f;
      }
  }
}

// Weights times (dp - delta).
__device__ __forceinline__ void slope(Sums<STEP>& s, const Sums<STEP>& dp, unsigned numbers) {
#pragma unroll
  for (int x = 0; x < STEP / 8; ++x) {
    float delta[2];
    shared_load(delta, numbers + x * 32);
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[y][x][e] *= dp[y][x][e] - delta[e % 2];
  }
}

}  // namespace

// q, grad: (B, H, Tq, HEAD); k, v, dk, dv: (B, H / group, Tk, HEAD), by strides in elements of
// batches, heads and rows, every row on 16 bytes; lengths: (B,) or null; rows: (B, H, 2, whole),
// `whole` a multiple of STEP. `scale` has log2(e) in it, `factor` has not. Grid: (blocks of keys
// times SPLIT, H / group, B). Dynamic shared memory: 2 OWN + 2 STAGE.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_keys(const T* q, const T* k, const T* v, const T* grad, const int* lengths,
               const float* rows, T* dk, T* dv, index_t heads, index_t group, index_t tq,
               index_t tk, index_t whole, index_t q_batch, index_t q_head, index_t q_row,
               index_t k_batch, index_t k_head, index_t k_row, index_t v_batch, index_t v_head,
               index_t v_row, index_t grad_batch, index_t grad_head, index_t grad_row,
               index_t dk_batch, index_t dk_head, index_t dk_row, index_t dv_batch,
               index_t dv_head, index_t dv_row, double scale_, double factor, index_t causal,
               index_t seed, index_t threshold, double rescale_) {
  extern __shared__ __align__(128) unsigned char pool[];
  const unsigned shared = shared_address(pool), ring = shared + 2 * OWN;
  const float scale = (float)scale_, rescale = (float)rescale_;
  const int few = blockIdx.y, batch = blockIdx.z, lane = lane_id();
  const int start = blockIdx.x / SPLIT * BLOCK;  // under a causal mask the first have most to do
  const int column = blockIdx.x % SPLIT * (KEPT_COLUMNS / 16);  // in sixteens
  const int keys = keys_of(lengths, batch, tk);
  const int first = start + warp_row();  // the warp's first key
  // Tiles of queries that see one of these keys, in each head of the group, head after head.
  const int before = causal ? start / STEP * STEP : 0;
  const int each = start < keys ? max(0, ((int)tq - before + STEP - 1) / STEP) : 0;
  const int tiles = each * (int)group, lowest = few * (int)group;

  int asked = before, asked_head = 0;  // of the tile to ask for, the first query and its head
  auto fetch = [&](int i) {
    const unsigned to = ring + i % 2 * STAGE;
    const int head = lowest + asked_head, left = (int)tq - asked;
    ask<STEP>(to, rows_at(q, q_batch, q_head, q_row, head, asked), (int)q_row, left);
    const T* grad_at = rows_at(grad, grad_batch, grad_head, grad_row, head, asked);
    ask<STEP>(to + WALKED, grad_at, (int)grad_row, left);
    const float* two = rows + (anew(blockIdx.z) * heads + head) * 2 * whole;
    ask_numbers(to + 2 * WALKED, two + asked, whole);
  };
  if (tiles > 0) {
    ask<BLOCK>(shared, rows_at(k, k_batch, k_head, k_row, few, start), (int)k_row, keys - start);
    const T* v_at = rows_at(v, v_batch, v_head, v_row, few, start);
    ask<BLOCK>(shared + OWN, v_at, (int)v_row, keys - start);
    fetch(0);
  }
  copies_commit();
  Sums<KEPT_COLUMNS> dk_sums = {}, dv_sums = {};

  auto attend = [&](int i, int from, int head, bool masked) {
    const unsigned tile = ring + i % 2 * STAGE, own = shared + warp_row() * ROW;
    const unsigned numbers = tile + 2 * WALKED + lane % 4 * 8;
    const int query = from + lane % 4 * 2, key = first + lane / 4;
    unsigned long long kept = 0;
    if constexpr (DROPOUT) {
      const Kept dropout = {(unsigned long long)seed, threshold};
      const index_t line = (index_t)batch * heads + lowest + head;
      kept = dropout.bits<STEP>((line * tq + query) * tk + key, 1, tk);
    }
    Sums<STEP> s = {}, dp;
    rows_by_rows<STEP>(s, own, tile);
    weigh(s, numbers, scale, masked, query - key);
    Packed<STEP> packed;
    if constexpr (DROPOUT) drop<STEP>(dp, s, kept, rescale);
    pack<STEP>(packed, DROPOUT ? dp : s);
    packed_by_rows<STEP, KEPT_COLUMNS>(dv_sums, packed, tile + WALKED, column);
    clear<STEP>(dp);
    rows_by_rows<STEP>(dp, own + OWN, tile + WALKED);
    if constexpr (DROPOUT) drop<STEP>(dp, dp, kept, rescale);
    slope(s, dp, numbers + TWO);
    pack<STEP>(packed, s);
    packed_by_rows<STEP, KEPT_COLUMNS>(dk_sums, packed, tile, column);
  };

  for (int i = 0; i < tiles; ++i) {
    copies_wait<0>();
    __syncthreads();  // tile i is there, and nobody reads the tile before it any more
    const int from = asked, head = asked_head;
    asked += STEP;
    if (asked >= tq) asked = before, ++asked_head;
    if (i + 1 < tiles) fetch(i + 1);
    copies_commit();
    // Queries before its first key a warp has none of, and those from its last on need no mask.
    if (!causal || from >= first + ROWS - 1) attend(i, from, head, false);
    else if (from + STEP > first) attend(i, from, head, true);
  }

#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < KEPT_COLUMNS / 8; ++x)
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // a key past the length is nobody's, whatever was summed
        const bool seen = first + y * 16 + e / 2 * 8 + lane / 4 < keys;
        dk_sums[y][x][e] = seen ? dk_sums[y][x][e] * (float)factor : 0.0f;
        dv_sums[y][x][e] = seen ? dv_sums[y][x][e] : 0.0f;
      }
  dk += batch * dk_batch + few * dk_head;
  dv += batch * dv_batch + few * dv_head;
  write<KEPT_COLUMNS>(dk_sums, shared, dk, dk_row, start, (int)tk, column * 2);
  write<KEPT_COLUMNS>(dv_sums, shared + OWN, dv, dv_row, start, (int)tk, column * 2);
}
