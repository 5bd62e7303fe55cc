// Norms backward by clusters that stay: a row over CLUSTER blocks, each read once.
//
// A block has a slice of the columns, VECTORS accesses a thread, and keeps the sums of g xhat and
// of g for them in registers over all the rows it takes. A ring of STAGES rows comes by the bulk
// copy engine into shared memory, so that loads never wait for arithmetic. Each block takes its
// slice's mean and squares; one exchange a row brings them, and the sums of g w and g w x, together
// as Chan, Golub and LeVeque (1983) merge variances. Compute capability 9.0 and later.
// g, x and (ADD) more: (rows, columns), strides apart; dx, dr: contiguous; part: (2 or 1, clusters,
// columns) float32. All are multiples of 16 bytes. Bytes: 2n read + n written (ADD: 3n + 2n).
#define ACCESS (16 / sizeof(WEFT_T))
#include "norm.cuh"
#include "bulk.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef VECTORS
#define VECTORS 2
#endif
#ifndef RESIDENT
#define RESIDENT 2
#endif
constexpr int TENSORS = ADD ? 3 : 2;

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Mean, what it was off by, squares left, sums of g w and of g w (x - mean): a block's or a row's.
using Row = Sums<5>;

// What this block sums over its slice of `count` elements.
__device__ __forceinline__ Row slice_sums(const Pack (&x)[VECTORS], const Pack (&g)[VECTORS],
                                          const Weights (&w)[VECTORS], int accesses, float count,
                                          Sums<2>* first, Sums<3>* second) {
  float mean = 0.0f, average = 0.0f;
  Sums<2> sums = {};
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sums.at[0] += to_float(x[i].at[j]);
      sums.at[1] = fmaf(to_float(g[i].at[j]), to_float(w[i].at[j]), sums.at[1]);
    }
  if (CENTRED) {
    sums = block_sums<2>(sums, first);
    mean = count > 0.0f ? sums.at[0] / count : 0.0f;
    average = sums.at[1];
  }
  Sums<3> left = {};
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if ((int)threadIdx.x + i * THREADS >= accesses) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float d = to_float(x[i].at[j]) - mean;
      left.at[0] += d;
      left.at[1] = fmaf(d, d, left.at[1]);
      left.at[2] = fmaf(to_float(g[i].at[j]) * to_float(w[i].at[j]), d, left.at[2]);
    }
  }
  left = block_sums<3>(left, second);
  if (!CENTRED) return {{0.0f, 0.0f, left.at[1], 0.0f, left.at[2]}};
  const float more = count > 0.0f ? left.at[0] / count : 0.0f;
  return {{mean, more, left.at[1] - more * left.at[0], average, left.at[2] - more * average}};
}

// Of the whole row: the shift from this block's mean, 1 / deviation, mean g w, mean g w xhat.
struct Whole { float shift, scale, average, dot; };

__device__ __forceinline__ Whole merged(const Row& mine, Row* peers, int accesses_all, int each,
                                        float columns, float eps) {
  const int lane = threadIdx.x % 32;
  Row one = {};
  float count = columns;
  if (CLUSTER > 1) {
    if (threadIdx.x < CLUSTER) {
      const unsigned own = (unsigned)__cvta_generic_to_shared(peers + blockIdx.x % CLUSTER);
      unsigned theirs;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own), "r"(threadIdx.x));
#pragma unroll
      for (int k = 0; k < 5; ++k)
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(theirs + 4 * k), "f"(mine.at[k])
                     : "memory");
    }
    cluster_barrier();
    count = (float)(max(0, min(each, accesses_all - lane * each)) * N);
    if (lane < CLUSTER) one = peers[lane]; else count = 0.0f;
  } else if (lane == 0) {
    one = mine;
  } else {
    count = 0.0f;
  }
  if (!CENTRED) {
    const float scale = inverse_root(warp_sum(one.at[2]) / columns + eps);
    return {0.0f, scale, 0.0f, warp_sum(one.at[4]) / columns * scale};
  }
  const float off = (one.at[0] - mine.at[0]) + one.at[1];  // that block's mean from this one's
  const float shift = warp_sum(count > 0.0f ? off * count : 0.0f) / columns;
  const float away = off - shift;
  const float squares = warp_sum(count > 0.0f ? fmaf(away * away, count, one.at[2]) : 0.0f);
  const float scale = inverse_root(not_below_zero(squares) / columns + eps);
  const float dot = warp_sum(count > 0.0f ? fmaf(away, one.at[3], one.at[4]) : 0.0f);
  return {shift, scale, warp_sum(one.at[3]) / columns, dot / columns * scale};
}

__device__ __forceinline__ void ask(const WEFT_T* const (&from)[3], const index_t (&stride)[3],
                                    index_t row, int bytes, unsigned char* to,
                                    unsigned long long* arrived) {
  if (!bytes) return;
  expect(arrived, TENSORS * bytes);
#pragma unroll
  for (int t = 0; t < TENSORS; ++t)
    copy(to + t * bytes, from[t] + row * stride[t], bytes, arrived);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
norm_backward(const WEFT_T* __restrict__ g, const WEFT_T* __restrict__ more,
              const WEFT_T* __restrict__ x, const WEFT_W* __restrict__ w, WEFT_T* __restrict__ dx,
              WEFT_T* __restrict__ dr, float* __restrict__ part, index_t rows, index_t columns,
              index_t g_stride, index_t more_stride, index_t x_stride, double eps) {
  __shared__ unsigned long long arrived[STAGES];
  __shared__ Sums<2> first[32];
  __shared__ Sums<3> second[2][32];  // by turns: without a mean there is one barrier a row
  __shared__ Row peers[2][CLUSTER];
  const int all = columns / N, each = (all + CLUSTER - 1) / CLUSTER;
  const int begin = min((int)(blockIdx.x % CLUSTER) * each, all);
  const int accesses = min(each, all - begin), bytes = accesses * 16;
  const index_t clusters = gridDim.x / CLUSTER, from = (index_t)begin * N;
  const WEFT_T* const sources[3] = {g + from, x + from, more + from};
  const index_t strides[3] = {g_stride, x_stride, more_stride};
  if (threadIdx.x == 0)
    for (int k = 0; k < STAGES; ++k) prepare(arrived + k);
  __syncthreads();
  if (CLUSTER > 1) cluster_barrier();  // no block is written to before it runs
  index_t row = blockIdx.x / CLUSTER;
  if (threadIdx.x == 0)
    for (int k = 0; k < STAGES; ++k)
      if (row + k * clusters < rows)
        ask(sources, strides, row + k * clusters, bytes, memory + k * TENSORS * bytes, arrived + k);

  Weights weights[VECTORS];
  float dw[VECTORS * N] = {}, db[CENTRED ? VECTORS * N : 1] = {};
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * THREADS;
#pragma unroll
    for (int j = 0; j < N; ++j) weights[i].at[j] = from_float<WEFT_W>(0.0f);
    if (at < accesses) weights[i] = reinterpret_cast<const Weights*>(w + from)[at];
  }
  int stage = 0;
  unsigned phase = 0, turn = 0;
  for (; row < rows; row += clusters) {
    if (bytes) wait(arrived + stage, phase);
    const Pack* held = reinterpret_cast<const Pack*>(memory + stage * TENSORS * bytes);
    Pack gs[VECTORS], xs[VECTORS], extra[ADD ? VECTORS : 1];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      const bool there = at < accesses;
      gs[i] = there ? held[at] : zeros();
      xs[i] = there ? held[accesses + at] : zeros();
      if (ADD) extra[ADD ? i : 0] = there ? held[2 * accesses + at] : zeros();
    }
    const Row mine =
        slice_sums(xs, gs, weights, accesses, (float)(accesses * N), first, second[turn]);
    // All have passed a barrier since they read the stage: the next row may come into it.
    if (threadIdx.x == 0 && row + STAGES * clusters < rows)
      ask(sources, strides, row + STAGES * clusters, bytes, memory + stage * TENSORS * bytes,
          arrived + stage);
    const Whole whole = merged(mine, peers[turn], all, each, (float)columns, (float)eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      if (at >= accesses) continue;
      Pack out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float grad = to_float(gs[i].at[j]);
        const float hat = ((to_float(xs[i].at[j]) - mine.at[0]) - whole.shift) * whole.scale;
        float d = grad * to_float(weights[i].at[j]) - hat * whole.dot;
        if (CENTRED) {
          d -= whole.average;
          db[CENTRED ? i * N + j : 0] += grad;
        }
        dw[i * N + j] = fmaf(grad, hat, dw[i * N + j]);
        d *= whole.scale;
        if (ADD) d += to_float(extra[ADD ? i : 0].at[j]);
        out.at[j] = from_float<WEFT_T>(d);
      }
      reinterpret_cast<Pack*>(dx + row * columns + from)[at] = out;
      if (ADD) reinterpret_cast<Pack*>(dr + row * columns + from)[at] = out;
    }
    turn ^= 1;
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  float* const mine = part + blockIdx.x / CLUSTER * columns + from;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (at >= accesses) continue;
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      float4* to = reinterpret_cast<float4*>(mine + at * N + j);
      const float* s = dw + i * N + j;
      *to = make_float4(s[0], s[1], s[2], s[3]);
      if (!CENTRED) continue;
      const float* t = db + (CENTRED ? i * N + j : 0);
      to[clusters * columns / 4] = make_float4(t[0], t[1], t[2], t[3]);
    }
  }
}

#endif
