// Attention's forward: online softmax over tiles of keys; scores and weights stay in registers.
//
// A block computes 16 MT WARPS queries of one head and reads the keys STEP at a time, with two tiles of keys
// and values in shared memory: one is read while asynchronous copies fill the other. A warp has 16 MT
// queries. Its scores become weights in place, are rounded, and are the first factor of the second product in
// the registers where they were summed. Bytes: q read and out written once; k and v read once by each block,
// mostly from the L2. Sources: FlashAttention-2 (arXiv:2307.08691), online softmax (arXiv:1805.02867).
#include "attention_tiles.cuh"

namespace {

// The reference of a row's exponentials may lag behind its maximum by this power of 2 before the sums are
// rescaled. Weights up to 2^8 fit float16 and round like those below 1. After the first tile a rescale is
// rare.
constexpr float LAG = 8.0f;

// Running state of online softmax, for rows lane / 4 and lane / 4 + 8 of each 16.
struct SoftmaxState {
  float acc[MT][COLUMNS / 8][4] = {};
  float top[MT][2], total[MT][2];  // a lane's total covers its own columns only

  __device__ __forceinline__ SoftmaxState() {
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int h = 0; h < 2; ++h) top[y][h] = -INFINITE, total[y][h] = 0.0f;
  }

  // Raise the rows' reference to the scores' maximum if it lags too far, and rescale the sums. Every query
  // sees the first key, so that no reference is -inf after the first tile.
  __device__ __forceinline__ void raise(const Accumulators<STEP>& s, float scale) {
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = s[y][0][2 * h];
#pragma unroll
        for (int x = 0; x < STEP / 8; ++x)
          most = fmaxf(most, fmaxf(s[y][x][2 * h], s[y][x][2 * h + 1]));
        // Lanes 4 k to 4 k + 3 share a row: two exchanges reduce it, and no shared memory is needed.
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)) * scale;
        if (most > top[y][h] + LAG) {
          // At the first tile top is -inf and shrink is 0: the sums, which are 0, stay 0. A NaN score fails
          // the comparison above, and reaches the total through weigh.
          const float shrink = power_of_2(top[y][h] - most);
          top[y][h] = most;
          total[y][h] *= shrink;
#pragma unroll
          for (int x = 0; x < COLUMNS / 8; ++x)
            acc[y][x][2 * h] *= shrink, acc[y][x][2 * h + 1] *= shrink;
        }
      }
  }

  // Replace scores by weights 2^(scale s - top) and add them to the totals.
  __device__ __forceinline__ void weigh(Accumulators<STEP>& s, float scale) {
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int x = 0; x < STEP / 8; ++x)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // scale_log2 includes log2(e): one fma and one exp2 for each score. The unrounded weight is added
          // to the total.
          s[y][x][e] = power_of_2(fmaf(s[y][x][e], scale, -top[y][e / 2]));
          total[y][e / 2] += s[y][x][e];
        }
  }

  // Return a row's divisor, summed over the four lanes that share it; 1 for a row that has seen no key.
  __device__ __forceinline__ float divisor(int y, int h) const {
    float sum = total[y][h];
    // The totals are reduced once, at the end, instead of at each tile.
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum == 0.0f ? 1.0f : sum;
  }
};

}  // namespace

// Reads q, k, v, lengths; writes out and lse. Grid: (blocks of queries, H, B). Dynamic shared memory:
// BLOCK_TILE + 4 STEP_TILE.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_forward(const __grid_constant__ AttentionArgs args) {
  extern __shared__ __align__(128) unsigned char pool[];
  const unsigned shared = shared_address(pool), buffer = shared + BLOCK_TILE;
  const int head = blockIdx.y, batch = blockIdx.z, lane = lane_id();
  const int tq = (int)args.tq;
  // Under a causal mask the blocks with most keys start first, so that the last blocks of the grid are short.
  const int start = (args.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BLOCK_ROWS;
  const int keys = visible_keys(args.lengths, batch, args.tk);
  const int tiles = ((args.causal ? min(keys, start + BLOCK_ROWS) : keys) + STEP - 1) / STEP;
  const index_t head_index = (index_t)batch * args.heads + head;
  const int first = start + warp_row();  // the warp's first query

  const KeyValueStream stream = {args.k, args.v, head / (int)args.group, keys, tiles, buffer};
  SoftmaxState state;
  // No key is visible (a length of 0): nothing is loaded, and out is written as zeros.
  if (tiles > 0) {
    load_tile<BLOCK_ROWS>(shared, row_address(args.q, head, start), (int)args.q.row_stride, tq - start);
    stream.load(0);
  }
  copies_commit();
  auto attend = [&](int t, bool masked) {
    const unsigned tile = stream.at(t);
    Accumulators<STEP> s = {};
    multiply_transposed<STEP>(s, shared + warp_row() * ROW_BYTES, tile);
    if (masked) {
      const int thread = opaque_thread();  // the mask's row numbers hold no registers in unmasked tiles
      const int row0 = start + thread / 32 * WARP_ROWS + thread % 32 / 4;
      const int key0 = t * STEP + thread % 4 * 2;
#pragma unroll
      for (int y = 0; y < MT; ++y)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int left = (args.causal ? min(keys, row0 + y * 16 + h * 8 + 1) : keys) - key0;
#pragma unroll
          for (int x = 0; x < STEP / 8; ++x) {
            if (x * 8 >= left) s[y][x][2 * h] = -INFINITE;
            if (x * 8 + 1 >= left) s[y][x][2 * h + 1] = -INFINITE;
          }
        }
    }
    state.raise(s, args.scale_log2);
    state.weigh(s, args.scale_log2);
    if constexpr (DROPOUT) {
      const DropoutMask dropout = {(unsigned long long)args.seed, args.threshold};
      const index_t at = (head_index * args.tq + first + lane / 4) * args.tk + t * STEP + lane % 4 * 2;
      // After weigh: the divisor is the sum of all weights, dropped ones included, as in torch.
      apply_dropout<STEP>(s, s, dropout.bits<STEP>(at, args.tk, 1), args.rescale);
    }
    Fragments<STEP> weights;
    pack<STEP>(weights, s);
    multiply_packed<STEP, COLUMNS>(state.acc, weights, tile + STEP_TILE);
  };

  stream.for_each_tile(args.causal, first, attend);

#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A row without visible keys has top -inf and divisor 1: its lse is -inf, and its output 0.
      const float divisor = state.divisor(y, h), factor = __fdividef(1.0f, divisor);
      const int row = first + y * 16 + h * 8 + lane / 4;
      if (lane % 4 == 0 && row < tq)
        args.lse[head_index * args.tq + row] = (state.top[y][h] + log2f(divisor)) * LN2;
#pragma unroll
      for (int x = 0; x < COLUMNS / 8; ++x) {
        state.acc[y][x][2 * h] *= factor;
        state.acc[y][x][2 * h + 1] *= factor;
      }
    }
  T* out = args.out.data + batch * args.out.batch_stride + head * args.out.head_stride;
  store_rows<COLUMNS>(state.acc, shared, out, args.out.row_stride, start, tq);
}
