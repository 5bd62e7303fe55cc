// Attention's forward: online softmax over tiles of keys, scores and weights in registers only.
//
// A block owns 16 MT WARPS queries of one head and walks the keys STEP at a time, two tiles of keys
// and values in shared memory: one read, one on its way by asynchronous copies. A warp has 16 MT
// queries; its scores, made weights and rounded, are the next product's first factor in the very
// registers where they were summed. Bytes: q read and out written once; k and v once a block, most
// of it from the L2. Sources: FlashAttention-2 (arXiv:2307.08691), online softmax
// (arXiv:1805.02867).
#include "attention_tiles.cuh"

namespace {

// A row's largest score so far may lag behind by this many powers of 2 before what was summed is
// scaled anew: weights up to 2^8 fit float16 and round as those below 1 do, and once the first tile
// is past, that is hardly ever due.
constexpr float LAG = 8.0f;

struct Rows {
  float acc[MT][COLUMNS / 8][4] = {};
  float top[MT][2], total[MT][2];  // of rows lane / 4 and + 8; a lane's total is of its columns

  __device__ __forceinline__ Rows() {
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int h = 0; h < 2; ++h) top[y][h] = -INFINITE, total[y][h] = 0.0f;
  }

  // The first key of all is seen by every query, so that after one tile no maximum is -inf.
  __device__ __forceinline__ void raise(const Sums<STEP>& s, float scale) {
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = s[y][0][2 * h];
#pragma unroll
        for (int x = 0; x < STEP / 8; ++x)
          most = fmaxf(most, fmaxf(s[y][x][2 * h], s[y][x][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)) * scale;
        if (most > top[y][h] + LAG) {
          const float shrink = power_of_2(top[y][h] - most);
          top[y][h] = most;
          total[y][h] *= shrink;
#pragma unroll
          for (int x = 0; x < COLUMNS / 8; ++x)
            acc[y][x][2 * h] *= shrink, acc[y][x][2 * h + 1] *= shrink;
        }
      }
  }

  // Scores to weights, of which `total` has the sum.
  __device__ __forceinline__ void weigh(Sums<STEP>& s, float scale) {
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int x = 0; x < STEP / 8; ++x)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[y][x][e] = power_of_2(fmaf(s[y][x][e], scale, -top[y][e / 2]));
          total[y][e / 2] += s[y][x][e];
        }
  }

  // What every row's answer is divided by (1 where it has seen no key), over all four lanes.
  __device__ __forceinline__ float divisor(int y, int h) const {
    float sum = total[y][h];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum == 0.0f ? 1.0f : sum;
  }
};

}  // namespace

// q, out: (B, H, Tq, HEAD); k, v: (B, H / group, Tk, HEAD), by strides in elements of batches,
// heads and rows, every row on 16 bytes; lse: (B, H, Tq); lengths: (B,) or null. `scale` has
// log2(e) in it. Grid: (blocks of queries, H, B). Dynamic shared memory: OWN + 4 WALKED.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_forward(const T* q, const T* k, const T* v, const int* lengths, T* out, float* lse,
                  index_t heads, index_t group, index_t tq, index_t tk, index_t q_batch,
                  index_t q_head, index_t q_row, index_t k_batch, index_t k_head, index_t k_row,
                  index_t v_batch, index_t v_head, index_t v_row, index_t out_batch,
                  index_t out_head, index_t out_row, double scale_, index_t causal, index_t seed,
                  index_t threshold, double rescale_) {
  extern __shared__ __align__(128) unsigned char pool[];
  const unsigned shared = shared_address(pool), ring = shared + OWN;
  const float scale = (float)scale_, rescale = (float)rescale_;
  const int head = blockIdx.y, batch = blockIdx.z, lane = lane_id();
  const int few = head / (int)group;  // the head of keys
  // Under a causal mask the longest first: what is left for the end is short.
  const int start = (causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BLOCK;
  const int keys = keys_of(lengths, batch, tk);
  const int tiles = ((causal ? min(keys, start + BLOCK) : keys) + STEP - 1) / STEP;
  const index_t line = (index_t)batch * heads + head;
  const int first = start + warp_row();  // the warp's first query

  const Keys walked = {k,      v,      k_batch, k_head, k_row, v_batch,
                       v_head, v_row,  few,     keys,   tiles, ring};
  Rows rows;
  if (tiles > 0) {
    const T* q_at = rows_at(q, q_batch, q_head, q_row, head, start);
    ask<BLOCK>(shared, q_at, (int)q_row, (int)tq - start);
    walked.fetch(0);
  }
  copies_commit();
  auto attend = [&](int t, bool masked) {
    const unsigned from = walked.at(t);
    Sums<STEP> s = {};
    rows_by_rows<STEP>(s, shared + warp_row() * ROW, from);
    if (masked) {
      const int thread = thread_anew();
      const int row0 = start + thread / 32 * ROWS + thread % 32 / 4;
      const int key0 = t * STEP + thread % 4 * 2;
#pragma unroll
      for (int y = 0; y < MT; ++y)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int left = (causal ? min(keys, row0 + y * 16 + h * 8 + 1) : keys) - key0;
#pragma unroll
          for (int x = 0; x < STEP / 8; ++x) {
            if (x * 8 >= left) s[y][x][2 * h] = -INFINITE;
            if (x * 8 + 1 >= left) s[y][x][2 * h + 1] = -INFINITE;
          }
        }
    }
    rows.raise(s, scale);
    rows.weigh(s, scale);
    if constexpr (DROPOUT) {
      const Kept dropout = {(unsigned long long)seed, threshold};
      const index_t at = (line * tq + first + lane / 4) * tk + t * STEP + lane % 4 * 2;
      drop<STEP>(s, s, dropout.bits<STEP>(at, tk, 1), rescale);
    }
    Packed<STEP> weights;
    pack<STEP>(weights, s);
    packed_by_rows<STEP, COLUMNS>(rows.acc, weights, from + WALKED);
  };

  walked.walk(causal, first, attend);

#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float divisor = rows.divisor(y, h), factor = __fdividef(1.0f, divisor);
      const int row = first + y * 16 + h * 8 + lane / 4;
      if (lane % 4 == 0 && row < tq)
        lse[line * tq + row] = (rows.top[y][h] + log2f(divisor)) * LN2;
#pragma unroll
      for (int x = 0; x < COLUMNS / 8; ++x) {
        rows.acc[y][x][2 * h] *= factor;
        rows.acc[y][x][2 * h + 1] *= factor;
      }
    }
  write<COLUMNS>(rows.acc, shared, out + batch * out_batch + head * out_head, out_row, start,
                 (int)tq);
}
