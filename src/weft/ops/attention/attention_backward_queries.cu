// Attention's backward for the queries: dq, and two numbers of each query for the keys' backward.
//
// With p = exp(s - lse), dp = grad v^T and delta = rowsum(out grad): ds = p (dp - delta), dq = ds k
// (FlashAttention-2, arXiv:2307.08691). As in attention_forward.cu a block computes 16 MT WARPS queries and
// reads the keys STEP at a time. One warp sums a row of dq, in one order. Bytes: q, grad and out read and dq
// written once; k and v read once by each block, mostly from the L2.
// Two accumulators of scores (s and dp) leave fewer registers for fragments than the forward has.
#define AHEAD (STEP == 64 ? 2 : 4)
#include "attention_tiles.cuh"

namespace {

constexpr int TERM_BYTES = BLOCK_ROWS * 4;  // one float for each query of the block

// Compute log2(e) lse and delta of the warp's queries; write them to shared memory at `to` and to the global
// `row_terms` of this head. Past the last query they are inf and 0, which make weights of 0. LANES lanes
// share a row, 16 bytes each.
__device__ __forceinline__ void compute_row_terms(unsigned to, float* row_terms, const AttentionArgs& args,
                                                  const T* out, const T* grad, const float* lse, int start) {
  constexpr int LANES = HEAD <= 32 ? 4 : HEAD <= 64 ? 8 : HEAD <= 128 ? 16 : 32;
  const int lane = lane_id(), chunk = lane % LANES, count = (int)args.tq;
  // The trip count is the same for all lanes, so that the shuffles below name all 32 of them.
#pragma unroll 2
  for (int i = lane / LANES; i < WARP_ROWS; i += 32 / LANES) {
    const int within = warp_row() + i, row = start + within;
    float sum = 0.0f;
    if (row < count && chunk * 8 < HEAD) {
      using Chunk = Vector<T, 8>;
      const auto a = *reinterpret_cast<const Chunk*>(out + row * args.out.row_stride + chunk * 8);
      const auto b = *reinterpret_cast<const Chunk*>(grad + row * args.grad.row_stride + chunk * 8);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(to_float(a.at[j]), to_float(b.at[j]), sum);
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (chunk == 0) {
      // 2^(s - inf) = 0: a padded query contributes nothing to dk and dv, without a mask in that kernel.
      const float top = row < count ? lse[row] * LOG2E : INFINITE;
      shared_store(to + within * 4, top);
      shared_store(to + TERM_BYTES + within * 4, sum);
      row_terms[row] = top;
      row_terms[args.padded_tq + row] = sum;
    }
  }
  __syncwarp();
}

}  // namespace

// Reads q, k, v, grad, out, lengths, lse; writes dq and row_terms, whose padded_tq covers all blocks. Grid:
// (blocks of queries, H, B). Dynamic shared memory: 2 BLOCK_TILE + 4 STEP_TILE + 8 BLOCK_ROWS.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_queries(const __grid_constant__ AttentionArgs args) {
  extern __shared__ __align__(128) unsigned char pool[];
  const unsigned shared = shared_address(pool), buffer = shared + 2 * BLOCK_TILE;
  const unsigned terms = buffer + 4 * STEP_TILE;
  const int head = blockIdx.y, batch = blockIdx.z, lane = lane_id();
  const int tq = (int)args.tq;
  // Under a causal mask the blocks with most keys start first.
  const int start = (args.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BLOCK_ROWS;
  const int keys = visible_keys(args.lengths, batch, args.tk);
  // Blocks past the last query only pad row_terms.
  const int seen = start >= tq ? 0 : args.causal ? min(keys, start + BLOCK_ROWS) : keys;
  const int tiles = (seen + STEP - 1) / STEP;
  const index_t head_index = (index_t)batch * args.heads + head;
  const int first = start + warp_row();  // the warp's first query

  const KeyValueStream stream = {args.k, args.v, head / (int)args.group, keys, tiles, buffer};
  if (tiles > 0) {
    load_tile<BLOCK_ROWS>(shared, row_address(args.q, head, start), (int)args.q.row_stride, tq - start);
    const T* grad_from = row_address(args.grad, head, start);
    load_tile<BLOCK_ROWS>(shared + BLOCK_TILE, grad_from, (int)args.grad.row_stride, tq - start);
    stream.load(0);
  }
  copies_commit();
  // The loads of out and grad overlap with the copies that were just issued.
  compute_row_terms(terms, args.row_terms + head_index * 2 * args.padded_tq, args,
                    args.out.data + batch * args.out.batch_stride + head * args.out.head_stride,
                    row_address(args.grad, head, 0), args.lse + head_index * args.tq, start);
  float top[MT][2], delta[MT][2], acc[MT][COLUMNS / 8][4] = {};
#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row() + y * 16 + h * 8 + lane / 4;
      top[y][h] = shared_load(terms + row * 4);
      delta[y][h] = shared_load(terms + TERM_BYTES + row * 4);
    }

  auto attend = [&](int t, bool masked) {
    const unsigned tile = stream.at(t), own = shared + warp_row() * ROW_BYTES;
    Accumulators<STEP> s = {}, dp = {};
    multiply_transposed<STEP>(s, own, tile);
    multiply_transposed<STEP>(dp, own + BLOCK_TILE, tile + STEP_TILE);
    const int row0 = first + lane / 4, key0 = t * STEP + lane % 4 * 2;
    if constexpr (DROPOUT) {
      const DropoutMask dropout = {(unsigned long long)args.seed, args.threshold};
      const index_t at = (head_index * args.tq + row0) * args.tk + key0;
      apply_dropout<STEP>(dp, dp, dropout.bits<STEP>(at, args.tk, 1), args.rescale);
    }
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int left = (args.causal ? min(keys, row0 + y * 16 + h * 8 + 1) : keys) - key0;
#pragma unroll
        for (int x = 0; x < STEP / 8; ++x)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& ds = s[y][x][2 * h + e];
            // exp(s - lse) by one fma and one exp2: lse includes the logarithm of the sum.
            const float p = power_of_2(fmaf(ds, args.scale_log2, -top[y][h]));
            // delta is computed from the rounded `out`; with dropout it holds as well, since out contains the
            // dropped weights' zeros.
            ds = p * (dp[y][x][2 * h + e] - delta[y][h]);
            if (masked && x * 8 + e >= left) ds = 0.0f;
          }
      }
    Fragments<STEP> packed;
    pack<STEP>(packed, s);
    multiply_packed<STEP, COLUMNS>(acc, packed, tile);
  };

  stream.for_each_tile(args.causal, first, attend);

#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < COLUMNS / 8; ++x)
      // The factor of dq = scale ds k is applied once, in float32, instead of to each score.
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[y][x][e] *= args.scale;
  T* dq = args.dq.data + batch * args.dq.batch_stride + head * args.dq.head_stride;
  store_rows<COLUMNS>(acc, shared, dq, args.dq.row_stride, start, tq);
}
