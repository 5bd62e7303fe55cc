// Norms backward by teams that stay: dx = rstd (g w - mean(g w) - xhat mean(g w xhat)), each row
// read once, and the sums of g xhat and of g for the weights' gradients.
//
// A team is some warps of a block, a block, or a cluster of blocks, and keeps its columns' sums
// in registers over all the rows it takes, which come through a ring (norm_ring.cuh). One walk
// over a row in registers takes all statistics, about a reference (norm_merge.cuh), so that a
// row costs one barrier; a second writes, for which a team of one warp reads the ring again: its
// rows need no registers in between, so that sums, weights and four warps a scheduler fit. At
// the end a block's teams add theirs up: a part a block.
// g, x and (ADD) more: (rows, columns), strides apart; dx, dr: contiguous; part: (2 or 1, blocks or
// clusters, columns) float32. All are multiples of 16 bytes. Bytes: 2n read + n written (ADD: 3n +
// 2n). With DROP dx is what dropout makes of dr. Shared memory: where w is not HELD in registers,
// its slice; the rings; the teams' sums after.
#define ACCESS (16 / sizeof(WEFT_T))
#define BACKWARD 1
#include "norm_dropped.cuh"
#include "norm_lean.cuh"
#include "norm_ring.cuh"

#ifndef HELD
#define HELD 0
#endif
#ifndef LEAN
#define LEAN 0  // as norm_lean.cuh says
#endif

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

static_assert(!LEAN || CLUSTER == 1, "a cluster's blocks do not have the row's first elements");
constexpr int TENSORS = 2 + ADD, EACH = VECTORS * N;
constexpr bool AGAIN = TEAM == 32;  // more warps would need a second barrier for it
using Row = Pack[VECTORS];

__device__ __forceinline__ Parts sums_of(const Row& x, const Row& g, const Weights (&held)[VECTORS],
                                         const Weights* kept, float ref, int first, int count) {
  Parts sums = {};
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (!FULL && first + i * TEAM >= count) continue;
    const Weights w = HELD ? held[i] : kept[first + i * TEAM];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float left = element(x[i], j) - ref;
      const float grad = element(g[i], j) * element(w, j);
      if (CENTRED) {
        sums.at[0] += left;
        sums.at[KINDS / 2] += grad;
      }
      sums.at[SQUARES] = fmaf(left, left, sums.at[SQUARES]);
      sums.at[DOT] = fmaf(grad, left, sums.at[DOT]);
    }
  }
  return sums;
}

#if LEAN
using Table = Entry[ENTRIES];  // and below, as without LEAN
__device__ __forceinline__ float met(const Parts& sums, float, Table& table, unsigned long long*,
                                     unsigned) {
  const float one = put_sums(sums, table);
  all_meet();
  return one;
}
__device__ __forceinline__ Whole whole_of(float one, float, const Table& table, const Counts&,
                                          float share, float eps) {
  return added_up(one, table, share, eps);
}
#else
// The warps' sums; all that share the row have put theirs. Blocks of a cluster count them as they
// come: its barrier would wait for their stores of dx.
using Table = float[ENTRIES * FIELDS];
__device__ __forceinline__ float met(const Parts& sums, float ref, Table& table,
                                     unsigned long long* told, unsigned phase) {
#if CLUSTER > 1
  if (threadIdx.x == 0) expect(told, sizeof(table));
  const float one = put<true>(sums, ref, table, told);
  wait(told, phase);
  __syncwarp();
#else
  const float one = put(sums, ref, table);
  all_meet();
#endif
  return one;
}
__device__ __forceinline__ Whole whole_of(float one, float ref, const Table& table,
                                          const Counts& counts, float share, float eps) {
  return merged(one, ref, table, counts, share, eps);
}
#endif

// Adds up what the block's teams have summed, in their order, and writes the block's parts: four
// columns a thread at a time; those of g stand `apart` from those of g xhat.
__device__ __forceinline__ void write_parts(const float (&sums)[1 + CENTRED][EACH], float* part,
                                            index_t apart, int columns) {
  if (TEAMS == 1) {
#pragma unroll
    for (int k = 0; k < (1 + CENTRED) * EACH; k += 4) {
      const float* four = &sums[k / EACH][k % EACH];
      const int e = k % EACH, at = ((int)threadIdx.x + e / N * TEAM) * N + e % N;
      if (at >= columns) continue;
      *reinterpret_cast<float4*>(part + k / EACH * apart + at) =
          make_float4(four[0], four[1], four[2], four[3]);
    }
    return;
  }
  // Element e of a thread's sums stands THREADS apart, so that neighbours write side by side.
  float* const all = reinterpret_cast<float*>(memory);
  __syncthreads();
#pragma unroll
  for (int e = 0; e < (1 + CENTRED) * EACH; ++e)
    all[e * THREADS + threadIdx.x] = sums[e / EACH][e % EACH];
  __syncthreads();
  for (int k = threadIdx.x; k < (1 + CENTRED) * EACH / 4 * TEAM; k += THREADS) {
    const int first = k % TEAM, from = k / TEAM * 4, e = from % EACH;
    const int column = (first + e / N * TEAM) * N + e % N;
    float four[4] = {};
#pragma unroll
    for (int t = 0; t < TEAMS; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] += all[(from + j) * THREADS + t * TEAM + first];
    if (column < columns)
      *reinterpret_cast<float4*>(part + from / EACH * apart + column) =
          make_float4(four[0], four[1], four[2], four[3]);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
norm_backward(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ more,
              const WEFT_T* __restrict__ x, const WEFT_W* __restrict__ w, WEFT_T* __restrict__ dx,
              WEFT_T* __restrict__ dr, float* __restrict__ part, index_t rows, index_t columns,
              index_t g_stride, index_t more_stride, index_t x_stride, double eps AND_DROPOUT) {
  __shared__ unsigned long long arrived[TEAMS][STAGES];
  __shared__ Table table[2][TEAMS];
  __shared__ unsigned long long told[2];
  const Slice slice(columns);
  const int team = threadIdx.x / TEAM, first = threadIdx.x % TEAM, bytes = slice.count * 16;
  const index_t from = (index_t)slice.begin * N;
  Weights* const kept = reinterpret_cast<Weights*>(memory);
  unsigned char* rings =
      memory + (HELD ? 0 : (slice.each * (int)sizeof(Weights) + 127) / 128 * 128);
  Ring<TENSORS> ring = {{g + from, x + from}, {g_stride, x_stride}, (int)rows, bytes,
                        rings + team * STAGES * TENSORS * bytes, arrived[team]};
  if (ADD) {
    ring.from[1 + ADD] = more + from;
    ring.stride[1 + ADD] = more_stride;
  }
  Weights held[VECTORS];
  if (CLUSTER > 1 && threadIdx.x == 0) prepare(told, 2);
  if (!HELD) ring.start();
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = first + i * TEAM;
    if (!FULL && at >= slice.count) continue;
    const Weights one = reinterpret_cast<const Weights*>(w + from)[at];
    if (HELD) held[i] = one; else if (team == 0) kept[at] = one;
  }
  if (HELD) ring.start(); else __syncthreads();
  const Counts counts = counts_of(slice.all, slice.each);
  const float share = __frcp_rn((float)columns);
  float added[1 + CENTRED][EACH] = {};
  unsigned turn = 0, phase = 0;
  for (int row = first_row(); row < rows; row += row_step(), turn ^= 1) {
    ring.await();
    Row gs, xs, extra;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = first + i * TEAM;
      const bool there = FULL || at < slice.count;
      gs[i] = there ? ring.held(0)[at] : zeros();
      xs[i] = there ? ring.held(1)[at] : zeros();
      if (ADD && !AGAIN) extra[i] = there ? ring.held(1 + ADD)[at] : zeros();
    }
    const float ref = LEAN ? head_mean(ring.held(1)) : reference(xs, slice.count);
    const Parts sums = sums_of(xs, gs, held, kept, ref, first, slice.count);
    const float one = met(sums, ref, table[turn][team], told + turn, phase);
    phase ^= turn;
    if (!AGAIN) ring.advance(row);
    const Whole whole = whole_of(one, ref, table[turn][team], counts, share, (float)eps);
    const float less = -whole.shift * whole.scale, average = whole.average * whole.scale;
    const float dot = whole.dot * whole.scale;
    const float mean = ref + whole.shift, slope = dot * whole.scale;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = first + i * TEAM;
      if (!FULL && at >= slice.count) continue;
      if (LEAN) asm volatile("" ::: "memory");  // accesses one by one: more at once would spill
      const Weights v = HELD ? held[i] : kept[at];
      if (AGAIN) {
        gs[i] = ring.held(0)[at];
        xs[i] = ring.held(1)[at];
        if (ADD) extra[i] = ring.held(1 + ADD)[at];
      } else {
        forget(xs[i]);
        forget(gs[i]);
      }
      const index_t to = ((index_t)row * (slice.all * N) + from) / N + at;
      Pack out;
      float ds[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
#if LEAN
        const float grad = element(gs[i], j), left = element(xs[i], j) - mean;
        const float hat = left, scaled = grad * whole.scale;  // whose product is grad xhat
        const float rest = CENTRED ? fmaf(left, slope, average) : left * slope;
        float d = fmaf(scaled, element(v, j), -rest);
#else
        const float grad = element(gs[i], j), left = element(xs[i], j) - ref, scaled = grad;
        const float hat = CENTRED ? fmaf(left, whole.scale, less) : left * whole.scale;
        const float rest = CENTRED ? fmaf(hat, dot, average) : hat * dot;
        float d = fmaf(grad * element(v, j), whole.scale, -rest);
#endif
        if (ADD) d += element(extra[i], j);
        ds[j] = d;
        out.at[j] = from_float<WEFT_T>(d);
        float& dw = added[0][i * N + j];
        dw = fmaf(scaled, hat, dw);
        if (CENTRED) added[CENTRED][i * N + j] += grad;
      }
      if (ADD) reinterpret_cast<Pack*>(dr)[to] = out;
      if (DROP) {
        DROPOUT.apply(ds, to * N);
#pragma unroll
        for (int j = 0; j < N; ++j) out.at[j] = from_float<WEFT_T>(ds[j]);
      }
      reinterpret_cast<Pack*>(dx)[to] = out;
      if (DROP && AGAIN && FULL) __syncwarp();  // two accesses at once would spill
    }
    if (AGAIN) {
      __syncwarp();
      ring.advance(row);
    }
  }
  write_parts(added, part + blockIdx.x / CLUSTER * columns + from, gridDim.x / CLUSTER * columns,
              slice.count * N);
}

#endif
