// Softmax forward of long rows by clusters that take one row after another (compute capability 9.0
// and later).
//
// Each block of a cluster has a ring of STAGES slices of rows in shared memory, which the bulk copy
// engine fills. A slice is read once, into registers; where they have room (KEEP) it waits there as
// the exponentials themselves, against its warp's maximum, which are then taken once and not twice.
// When every warp's statistics have come, each has read its part, and the next row is asked for in
// its place. A block ends when all that others send to it has come.
// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous; all in multiples of 16
// bytes; 2^30 rows at most, and no more clusters than rows. Bytes: n read + n written.
#define ACCESS (16 / sizeof(WEFT_T))
#ifndef CLUSTER
#define CLUSTER 8
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef VECTORS
#define VECTORS 4
#endif
#include "cluster.cuh"

constexpr bool KEEP = VECTORS * N <= 32;
constexpr int WARPS = THREADS / 32, ENTRIES = CLUSTER * WARPS;

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

// Puts this warp's statistics into every block's `table`, (ENTRIES,), and returns the row's.
__device__ __forceinline__ Statistics cluster_merge(Statistics mine, Statistics* table,
                                                    unsigned long long* met, unsigned phase) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) expect(met, ENTRIES * sizeof(Statistics));
  if (lane < CLUSTER) {
    Statistics* own = table + blockIdx.x % CLUSTER * WARPS + warp;
    send(lane, &own->top, mine.top, met);
    send(lane, &own->total, mine.total, met);
  }
  wait(met, phase);
  __syncwarp();
  float top = LEAST, total = 0.0f;
#pragma unroll
  for (int at = lane; at < ENTRIES; at += 32) top = fmaxf(top, table[at].top);
  top = warp_max(top);
#pragma unroll
  for (int at = lane; at < ENTRIES; at += 32)
    total += table[at].total * exp_of_difference(table[at].top, top);
  return {top, warp_sum(total)};
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
softmax_flow(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t rows, index_t columns,
             index_t stride) {
  __shared__ Statistics table[2][ENTRIES];
  __shared__ unsigned long long arrived[STAGES + 2];  // of rows, and of statistics by turns
  unsigned long long* const met = arrived + STAGES;
  const Slice part = slice_of(columns);
  const int step = gridDim.x / CLUSTER, end = rows;
  const auto slot = [](int stage) {
    return reinterpret_cast<Pack*>(memory) + stage * THREADS * VECTORS;
  };
  const auto ask = [&](int row, int stage) {
    if (row >= end || !part.accesses) return;
    expect(arrived + stage, part.accesses * BYTES);
    copy(slot(stage), x + row * stride + part.from, part.accesses * BYTES, arrived + stage);
  };
  int row = part.row;
  if (threadIdx.x == 0) {
    prepare(arrived, STAGES + 2);
    for (int k = 0; k < STAGES; ++k) ask(row + k * step, k);
  }
  __syncthreads();
  cluster_arrive_relaxed();
  int stage = 0;
  unsigned phase = 0, taken = 0;
  for (; row < end; row += step, ++taken) {
    if (part.accesses) wait(arrived + stage, phase);
    Pack in[VECTORS];
    Statistics mine = {LEAST, 0.0f};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      in[i] = filled(minus_infinity());
      if (at < part.accesses) in[i] = slot(stage)[at];
      mine.top = fmaxf(mine.top, wide_max(in[i]));
    }
    mine.top = warp_max(mine.top);
    float e[KEEP ? VECTORS * N : 1];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      forget(in[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float one = exp_of_difference(element(in[i], j), mine.top);
        if (KEEP) e[KEEP ? i * N + j : 0] = one;
        mine.total += one;
      }
    }
    mine.total = warp_sum(mine.total);
    if (!taken) cluster_wait();
    const Statistics whole = cluster_merge(mine, table[taken % 2], met + taken % 2, taken / 2 % 2);
    if (threadIdx.x == 0) ask(row + STAGES * step, stage);
    if (++stage == STAGES) stage = 0, phase ^= 1;
    float scale = __frcp_rn(whole.total);
    if (KEEP) scale *= exp_of_difference(mine.top, whole.top);
    Pack* const out = reinterpret_cast<Pack*>(y + row * columns + part.from);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      if (!KEEP) forget(in[i]);
      const Pack answer = packed([&](int j) {
        return scale * (KEEP ? e[KEEP ? i * N + j : 0]
                             : exp_of_difference(element(in[i], j), whole.top));
      });
      if (at < part.accesses) out[at] = answer;
    }
  }
}

#endif
