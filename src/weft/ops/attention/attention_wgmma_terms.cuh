// Row terms of attention's backward: log2-sum-exp and delta = sum(out grad), for attention_wgmma_backward.cu.
#pragma once

struct TermsArgs {
  const T *out, *grad;  // (B, H, Tq, HEAD), strides in elements
  long long out_strides[3], grad_strides[3];
  const float* lse;  // (B, H, Tq)
  float* terms;      // (B, H, query_tiles, 2, QUERIES)
  int heads, tq, query_tiles;
};

// Grid: blocks of 256 threads, LANES of them for each row; several blocks have a tile of queries.
extern "C" __global__ void __launch_bounds__(256) attention_wgmma_terms(const TermsArgs args) {
  constexpr int LANES = HEAD > 64 ? 16 : 8, ROWS = 256 / LANES, BLOCKS = QUERIES / ROWS;
  using Eight = Vector<T, 8>;
  const int tile = blockIdx.x / BLOCKS, in_tile = blockIdx.x % BLOCKS * ROWS + threadIdx.x / LANES;
  const int head = tile / args.query_tiles, row = tile % args.query_tiles * QUERIES + in_tile;
  const int batch = head / args.heads, in_batch = head % args.heads, lane = threadIdx.x % LANES;
  float delta = 0.0f, lse = INFINITE;
  if (row < args.tq) {
    // A row without keys (-inf) and a row past the last get +inf: all their weights are 0.
    const float stored = args.lse[(long long)head * args.tq + row];
    if (stored != -INFINITE) lse = stored * 1.4426950408889634f;
    if (lane * 8 < HEAD) {
      const Eight out = *reinterpret_cast<const Eight*>(args.out + batch * args.out_strides[0] +
                                                        in_batch * args.out_strides[1] +
                                                        row * args.out_strides[2] + lane * 8);
      const Eight grad = *reinterpret_cast<const Eight*>(args.grad + batch * args.grad_strides[0] +
                                                         in_batch * args.grad_strides[1] +
                                                         row * args.grad_strides[2] + lane * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta = fmaf(to_float(out.at[i]), to_float(grad.at[i]), delta);
    }
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffff, delta, step);
  if (lane > 0) return;
  float* const to = args.terms + (long long)tile * (2 * QUERIES) + in_tile;
  to[0] = lse;
  to[QUERIES] = delta;
}
