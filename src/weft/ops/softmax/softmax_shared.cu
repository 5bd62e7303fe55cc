// Softmax with a row in the shared memory of the CLUSTER blocks of a cluster (compute capability
// 9.0 and later), brought there by the bulk copy engine.
//
// A row that waits in registers limits how many blocks a multiprocessor holds: while few wait for
// their cluster, nobody loads. Shared memory holds as many bytes again, and one thread asks for all
// of a block's part in one instruction, so that five or more parts are under way a multiprocessor.
// The exponentials are taken twice, once to be added and once to be written, so instructions count:
// see Exponent.
// Rows, row strides and pointers are multiples of 16 bytes. Bytes: n read + n written (backward: 2n
// read + n written).
#define ACCESS (16 / sizeof(WEFT_T))
#ifndef CLUSTER
#define CLUSTER 4
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif
#include "cluster.cuh"

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

// exp(x - top) as 2^(x L - t), one multiply-add and one exp2 an element, where t is top L rounded
// and L = log2(e). All of a row then carry the factor 2^(top L - t), which `factor` undoes: exact
// but for exp2, and finite while |top| < 1e6, past which the difference is taken first.
struct Exponent {
  float top, t, factor;
  bool direct;
  __device__ __forceinline__ explicit Exponent(float top_)
      : top(top_), t(top_ * LOG2E), direct(fabsf(top_) < 1e6f) {
    factor = direct ? exp2_of(fmaf(-top, LOG2E, t)) : 1.0f;
  }
  static __device__ __forceinline__ float exp2_of(float a) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a));
    return e;
  }
  template <bool DIRECT> __device__ __forceinline__ float of(float x) const {
    return DIRECT ? exp2_of(fmaf(x, LOG2E, -t)) : exp_of_difference(x, top);
  }
};

template <bool DIRECT>
__device__ __forceinline__ float total_of(const Pack* in, int accesses, const Exponent& exponent) {
  float total = 0.0f;
#pragma unroll 4
  for (int at = threadIdx.x; at < accesses; at += THREADS) {
    const Pack p = in[at];
#pragma unroll
    for (int j = 0; j < N; ++j) total += exponent.of<DIRECT>(element(p, j));
  }
  return total * exponent.factor;
}

template <bool DIRECT>
__device__ __forceinline__ void write(const Pack* in, Pack* out, int accesses,
                                      const Exponent& exponent, float scale) {
  scale *= exponent.factor;
#pragma unroll 4
  for (int at = threadIdx.x; at < accesses; at += THREADS) {
    const Pack p = in[at];
    out[at] = packed([&](int j) { return exponent.of<DIRECT>(element(p, j)) * scale; });
  }
}

// Asks for this block's part of `count` tensors, one after the other in `memory`; returns when they
// are there, and `arrived`, of two barriers, has one left. All threads call.
__device__ __forceinline__ void bring(const WEFT_T* const* parts, int count, int bytes,
                                      unsigned long long* arrived) {
  if (threadIdx.x == 0) {
    prepare(arrived, 2);
    expect(arrived, count * bytes);
    for (int i = 0; i < count && bytes; ++i) copy(memory + i * bytes, parts[i], bytes, arrived);
  }
  __syncthreads();
  cluster_arrive_relaxed();
  wait(arrived, 0);
}

#ifndef BACKWARD

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. One cluster a row.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
softmax_shared(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t columns,
               index_t stride) {
  __shared__ unsigned long long arrived[2];
  __shared__ Statistics scratch[32];
  __shared__ Statistics peers[CLUSTER];
  const Slice part = slice_of(columns);
  const WEFT_T* const from[] = {x + part.row * stride + part.from};
  bring(from, 1, part.accesses * BYTES, arrived);
  const Pack* in = reinterpret_cast<const Pack*>(memory);

  Statistics mine = {LEAST, 0.0f};
#pragma unroll 4
  for (int at = threadIdx.x; at < part.accesses; at += THREADS)
    mine.top = fmaxf(mine.top, wide_max(in[at]));
  mine.top = warp_max(mine.top);
  const Exponent here(mine.top);
  mine.total = here.direct ? total_of<true>(in, part.accesses, here)
                           : total_of<false>(in, part.accesses, here);
  mine.total = warp_sum(mine.total);
  const Statistics block = block_merge(mine, scratch);
  const Statistics theirs = cluster_gather(block, peers, {LEAST, 0.0f}, arrived + 1);
  const float top = warp_max(theirs.top);
  const float scale = __frcp_rn(warp_sum(theirs.total * exp_of_difference(theirs.top, top)));

  Pack* out = reinterpret_cast<Pack*>(y + part.row * columns + part.from);
  const Exponent there(top);
  if (there.direct)
    write<true>(in, out, part.accesses, there, scale);
  else
    write<false>(in, out, part.accesses, there, scale);
}

#else

// grad: (rows, columns), rows `stride` apart; y, dx: (rows, columns) contiguous. One cluster a row.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
softmax_backward_shared(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                        WEFT_T* __restrict__ dx, index_t columns, index_t stride) {
  __shared__ unsigned long long arrived[2];
  __shared__ float scratch[32];
  __shared__ float peers[CLUSTER];
  const Slice part = slice_of(columns);
  const index_t place = part.row * columns + part.from;
  const WEFT_T* const from[] = {grad + part.row * stride + part.from, y + place};
  bring(from, 2, part.accesses * BYTES, arrived);
  const Pack* g = reinterpret_cast<const Pack*>(memory);
  const Pack* out = g + part.accesses;

  float dot = 0.0f;
#pragma unroll 4
  for (int at = threadIdx.x; at < part.accesses; at += THREADS) dot += pack_dot(g[at], out[at]);
  dot = block_sum(dot, scratch);
  dot = warp_sum(cluster_gather(dot, peers, 0.0f, arrived + 1));

  Pack* to = reinterpret_cast<Pack*>(dx + place);
#pragma unroll 4
  for (int at = threadIdx.x; at < part.accesses; at += THREADS) {
    const Pack p = g[at], q = out[at];
    to[at] = packed([&](int j) { return element(q, j) * (element(p, j) - dot); });
  }
}

#endif
#endif
