// Row terms of attention's backward: log2-sum-exp and delta = sum(out grad), for attention_wgmma_backward.cu.
#pragma once

struct TermsArgs {
  const T *out, *grad;  // (B, H, Tq, HEAD), strides in elements
  long long out_strides[3], grad_strides[3];
  const float* lse;  // (B, H, Tq)
  float* terms;      // (B, H, query_tiles, 2, QUERIES)
  int heads, tq, query_tiles;
};

// Grid: tiles of queries of all heads and batches. LANES lanes have a row, and a thread parts of ROWS_AT_ONCE
// rows, whose loads are issued together.
extern "C" __global__ void __launch_bounds__(256) attention_wgmma_terms(const TermsArgs args) {
  constexpr int LANES = HEAD > 64 ? 16 : 8, ROWS_AT_ONCE = QUERIES * LANES / 256;
  using Eight = Vector<T, 8>;
  const int head = blockIdx.x / args.query_tiles, query_tile = blockIdx.x % args.query_tiles;
  const int batch = head / args.heads, in_batch = head % args.heads, lane = threadIdx.x % LANES;
  const T* const out = args.out + batch * args.out_strides[0] + in_batch * args.out_strides[1];
  const T* const grad = args.grad + batch * args.grad_strides[0] + in_batch * args.grad_strides[1];
  Eight outs[ROWS_AT_ONCE], grads[ROWS_AT_ONCE];
#pragma unroll
  for (int i = 0; i < ROWS_AT_ONCE; ++i) {
    const long long row = query_tile * QUERIES + i * (256 / LANES) + threadIdx.x / LANES;
    const bool is_inside = row < args.tq && lane * 8 < HEAD;
    outs[i] = grads[i] = {};
    if (!is_inside) continue;
    outs[i] = *reinterpret_cast<const Eight*>(out + row * args.out_strides[2] + lane * 8);
    grads[i] = *reinterpret_cast<const Eight*>(grad + row * args.grad_strides[2] + lane * 8);
  }
#pragma unroll
  for (int i = 0; i < ROWS_AT_ONCE; ++i) {
    const int in_tile = i * (256 / LANES) + threadIdx.x / LANES, row = query_tile * QUERIES + in_tile;
    float delta = 0.0f, lse = INFINITE;
#pragma unroll
    for (int j = 0; j < 8; ++j) delta = fmaf(to_float(outs[i].at[j]), to_float(grads[i].at[j]), delta);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffff, delta, step);
    if (lane > 0) continue;
    // A row without keys (-inf) and a row past the last get +inf: all their weights are 0.
    if (row < args.tq) {
      const float stored = args.lse[(long long)head * args.tq + row];
      if (stored != -INFINITE) lse = stored * 1.4426950408889634f;
    }
    float* const to = args.terms + (long long)blockIdx.x * (2 * QUERIES) + in_tile;
    to[0] = lse;
    to[QUERIES] = delta;
  }
}
