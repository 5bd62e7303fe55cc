// Attention's backward toward the queries: dq, and two numbers a query for the keys' backward.
//
// With p = exp(s - lse), dp = grad v^T and delta = rowsum(out grad): ds = p (dp - delta), dq = ds k
// (FlashAttention-2, arXiv:2307.08691). As in attention_forward.cu a block owns 16 MT WARPS queries
// and walks the keys STEP at a time; each dq is summed by one warp in one order. Bytes: q, grad and
// out read and dq written once; k and v once a block, mostly from the L2.
#define AHEAD (STEP == 64 ? 2 : 4)
#include "attention_tiles.cuh"

namespace {

constexpr int TWO = BLOCK * 4;  // bytes of one number a query of the block

// log2(e) lse and rowsum(out grad) of the warp's queries, into shared memory at `to` and `rows`;
// past the last query inf and 0, which make weights of 0. LANES lanes have a row, 16 bytes each.
__device__ __forceinline__ void two_numbers(unsigned to, float* rows, index_t whole, const T* out,
                                            index_t out_row, const T* grad, index_t grad_row,
                                            const float* lse, int start, int count) {
  constexpr int LANES = HEAD <= 32 ? 4 : HEAD <= 64 ? 8 : HEAD <= 128 ? 16 : 32;
  const int lane = lane_id(), chunk = lane % LANES;
#pragma unroll 2
  for (int i = lane / LANES; i < ROWS; i += 32 / LANES) {
    const int within = warp_row() + i, row = start + within;
    float sum = 0.0f;
    if (row < count && chunk * 8 < HEAD) {
      using Chunk = Vector<T, 8>;
      const auto a = *reinterpret_cast<const Chunk*>(out + row * out_row + chunk * 8);
      const auto b = *reinterpret_cast<const Chunk*>(grad + row * grad_row + chunk * 8);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(to_float(a.at[j]), to_float(b.at[j]), sum);
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (chunk == 0) {
      const float top = row < count ? lse[row] * LOG2E : INFINITE;
      shared_store(to + within * 4, top);
      shared_store(to + TWO + within * 4, sum);
      rows[row] = top;
      rows[whole + row] = sum;
    }
  }
  __syncwarp();
}

}  // namespace

// q, grad, out, dq: (B, H, Tq, HEAD); k, v: (B, H / group, Tk, HEAD), by strides in elements of
// batches, heads and rows, every row on 16 bytes; lse: (B, H, Tq); lengths: (B,) or null; rows:
// (B, H, 2, whole), `whole` queries being all blocks'. `scale` has log2(e) in it, `factor` has not.
// Grid: (blocks of queries, H, B). Dynamic shared memory: 2 OWN + 4 WALKED + 8 BLOCK.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_queries(const T* q, const T* k, const T* v, const T* grad, const T* out,
                  const int* lengths, const float* lse, float* rows, T* dq, index_t heads,
                  index_t group, index_t tq, index_t tk, index_t whole, index_t q_batch,
                  index_t q_head, index_t q_row, index_t k_batch, index_t k_head, index_t k_row,
                  index_t v_batch, index_t v_head, index_t v_row, index_t grad_batch,
                  index_t grad_head, index_t grad_row, index_t out_batch, index_t out_head,
                  index_t out_row, index_t dq_batch, index_t dq_head, index_t dq_row,
                  double scale_, double factor, index_t causal, index_t seed, index_t threshold,
                  double rescale_) {
  extern __shared__ __align__(128) unsigned char pool[];
  const unsigned shared = shared_address(pool), ring = shared + 2 * OWN;
  const unsigned numbers = ring + 4 * WALKED;
  const float scale = (float)scale_, rescale = (float)rescale_;
  const int head = blockIdx.y, batch = blockIdx.z, lane = lane_id();
  const int few = head / (int)group;  // the head of keys
  // Under a causal mask the longest first.
  const int start = (causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BLOCK;
  const int keys = keys_of(lengths, batch, tk);
  // The last blocks may have nothing but two numbers to write.
  const int seen = start >= tq ? 0 : causal ? min(keys, start + BLOCK) : keys;
  const int tiles = (seen + STEP - 1) / STEP;
  const index_t line = (index_t)batch * heads + head;
  const int first = start + warp_row();  // the warp's first query

  const Keys walked = {k,      v,      k_batch, k_head, k_row, v_batch,
                       v_head, v_row,  few,     keys,   tiles, ring};
  if (tiles > 0) {
    const T* q_at = rows_at(q, q_batch, q_head, q_row, head, start);
    ask<BLOCK>(shared, q_at, (int)q_row, (int)tq - start);
    const T* grad_at = rows_at(grad, grad_batch, grad_head, grad_row, head, start);
    ask<BLOCK>(shared + OWN, grad_at, (int)grad_row, (int)tq - start);
    walked.fetch(0);
  }
  copies_commit();
  two_numbers(numbers, rows + line * 2 * whole, whole, out + batch * out_batch + head * out_head,
              out_row, rows_at(grad, grad_batch, grad_head, grad_row, head, 0), grad_row,
              lse + line * tq, start, (int)tq);
  float top[MT][2], delta[MT][2], acc[MT][COLUMNS / 8][4] = {};
#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row() + y * 16 + h * 8 + lane / 4;
      top[y][h] = shared_load(numbers + row * 4);
      delta[y][h] = shared_load(numbers + TWO + row * 4);
    }

  auto attend = [&](int t, bool masked) {
    const unsigned from = walked.at(t), own = shared + warp_row() * ROW;
    Sums<STEP> s = {}, dp = {};
    rows_by_rows<STEP>(s, own, from);
    rows_by_rows<STEP>(dp, own + OWN, from + WALKED);
    const int row0 = first + lane / 4, key0 = t * STEP + lane % 4 * 2;
    if constexpr (DROPOUT) {
      const Kept dropout = {(unsigned long long)seed, threshold};
      const index_t at = (line * tq + row0) * tk + key0;
      drop<STEP>(dp, dp, dropout.bits<STEP>(at, tk, 1), rescale);
    }
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int left = (causal ? min(keys, row0 + y * 16 + h * 8 + 1) : keys) - key0;
#pragma unroll
        for (int x = 0; x < STEP / 8; ++x)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& one = s[y][x][2 * h + e];
            const float p = power_of_2(fmaf(one, scale, -top[y][h]));
            one = p * (dp[y][x][2 * h + e] - delta[y][h]);
            if (masked && x * 8 + e >= left) one = 0.0f;
          }
      }
    Packed<STEP> ds;
    pack<STEP>(ds, s);
    packed_by_rows<STEP, COLUMNS>(acc, ds, from);
  };

  walked.walk(causal, first, attend);

#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < COLUMNS / 8; ++x)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[y][x][e] *= (float)factor;
  write<COLUMNS>(acc, shared, dq + batch * dq_batch + head * dq_head, dq_row, start, (int)tq);
}
