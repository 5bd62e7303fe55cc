// Softmax with a row in the shared memory of the CLUSTER blocks of a thread-block cluster (compute capability
// 9.0 and later), loaded by bulk copies.
//
// Rows in registers limit the number of blocks on an SM: while these wait for their cluster, no loads are in
// flight. Shared memory has as much space again, and one thread loads a block's slice with one instruction,
// so that five or more slices are in flight on an SM. Exponentials are computed twice, once for the sum and
// once for the output, so the number of instructions matters: see Exponent. Rows may begin at any element
// (PEEL in row_view.cuh): bulk copies bring the vectors of the body, and the first block takes the edges.
// Bytes: n read + n written (backward: 2n read + n written).
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#ifndef CLUSTER
#define CLUSTER 4
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif
#include "hopper.cuh"
#include "softmax.cuh"

// The slice of a row that this block has: its first element, and its length in vectors.
struct Slice {
  index_t row;
  RowView view;
  int from, vecs;

  __device__ __forceinline__ Slice(const WEFT_T* out, index_t columns)
      : row(blockIdx.x / CLUSTER), view(out + row * columns, columns) {
    // Equal parts but for the last block, whose slice may be shorter or empty.
    const int per_part = (view.vecs + CLUSTER - 1) / CLUSTER;
    const int first = min((int)(blockIdx.x % CLUSTER) * per_part, view.vecs);
    from = view.head + first * N;
    vecs = min(per_part, view.vecs - first);
  }
  // The bytes that hold the slice in one tensor: shifted vectors end in one vector more.
  __device__ __forceinline__ int bytes() const { return vecs ? (vecs + (PEEL == 2)) * BYTES : 0; }
  // The column of the edge that this thread has, or -1.
  __device__ __forceinline__ int edge_column() const {
    const bool has_edge = PEEL && blockIdx.x % CLUSTER == 0 && (int)threadIdx.x < view.edges;
    return has_edge ? view.edge_column(threadIdx.x) : -1;
  }
};
static_assert(THREADS >= MOST_EDGES, "a thread has one edge at most");

// Returns the maximum of a vector; bf16 two elements at a time, without a conversion.
__device__ __forceinline__ float wide_max(const Pack& p) {
#ifdef PAIRS
  __nv_bfloat162 top = reinterpret_cast<const __nv_bfloat162&>(p.word[0]);
#pragma unroll
  for (int k = 1; k < WORDS; ++k)
    top = __hmax2(top, reinterpret_cast<const __nv_bfloat162&>(p.word[k]));
  return fmaxf(__low2float(top), __high2float(top));
#else
  return pack_max(p);
#endif
}

#if __CUDA_ARCH__ >= 900

// Sends `own` to every block of the cluster and returns the values of all blocks, one in each lane (`nothing`
// from lane CLUSTER on), in every warp. The values are counted on `mbarrier` in its first phase. The caller
// has arrived at the cluster barrier before: no block writes into another that does not run yet. Each block
// waits for everything that is sent to it, so that none ends while others may still write to its shared
// memory.
template <typename T>
__device__ __forceinline__ T cluster_gather(T own, T* peers, T nothing, unsigned long long* mbarrier) {
  cluster_wait();
  if (threadIdx.x == 0) mbarrier_expect_bytes(mbarrier, CLUSTER * sizeof(T));
  if (threadIdx.x < CLUSTER) {
    float words[sizeof(T) / 4];
    memcpy(words, &own, sizeof(T));
    float* own = reinterpret_cast<float*>(peers + blockIdx.x % CLUSTER);
#pragma unroll
    for (int k = 0; k < (int)(sizeof(T) / 4); ++k) send_to_block(threadIdx.x, own + k, words[k], mbarrier);
  }
  mbarrier_wait(mbarrier, 0);
  __syncwarp();
  const int lane = threadIdx.x % 32;
  return lane < CLUSTER ? peers[lane] : nothing;
}

extern __shared__ __align__(128) unsigned char memory[];

// Computes exp(x - top) as 2^(x L - t) with L = log2(e) and t = top L rounded: one fma and one exp2 for each
// element. The rounding of t multiplies all of them by 2^(top L - t); `factor` is the inverse. It is exact
// apart from exp2, and finite while |top| < 1e6. For a larger |top| the subtraction comes first (not DIRECT).
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
__device__ __forceinline__ float total_of(const Body<Pack>& in, int vecs, const Exponent& exponent) {
  float total = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < vecs; i += THREADS) {
    const Pack p = in[i];
#pragma unroll
    for (int j = 0; j < N; ++j) total += exponent.of<DIRECT>(element(p, j));
  }
  return total * exponent.factor;
}

template <bool DIRECT>
__device__ __forceinline__ void write(const Body<Pack>& in, Pack* out, int vecs,
                                      const Exponent& exponent, float scale) {
  scale *= exponent.factor;
#pragma unroll 4
  for (int i = threadIdx.x; i < vecs; i += THREADS) {
    const Pack p = in[i];
    out[i] = packed([&](int j) { return exponent.of<DIRECT>(element(p, j)) * scale; });
  }
}

// Loads `bytes` bytes of each of `count` tensors, one after the other, to `memory`, and waits for them. All
// threads call it. `arrived` has two mbarriers: the first counts these loads, the second is left for
// cluster_gather. __syncthreads makes the initialised mbarriers visible to the other threads, and the cluster
// arrival to the other blocks.
__device__ __forceinline__ void load_slices(const Pack* const* parts, int count, int bytes,
                                      unsigned long long* arrived) {
  if (threadIdx.x == 0) {
    init_mbarriers(arrived, 2);
    mbarrier_expect_bytes(arrived, count * bytes);
    for (int i = 0; i < count && bytes; ++i) bulk_copy(memory + i * bytes, parts[i], bytes, arrived);
  }
  __syncthreads();
  cluster_arrive_relaxed();
  mbarrier_wait(arrived, 0);
}

#ifndef BACKWARD

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. One cluster a row.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, MIN_BLOCKS)
softmax_shared(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t columns,
               index_t stride) {
  __shared__ unsigned long long arrived[2];
  __shared__ Statistics scratch[32];
  __shared__ Statistics peers[CLUSTER];
  const Slice part(y, columns);
  x += part.row * stride;
  y += part.row * columns;
  const Body<Pack> source(x + part.from);
  const int edge_column = part.edge_column();
  const float edge = edge_column >= 0 ? to_float(x[edge_column]) : minus_infinity();
  const Pack* const from[] = {source.base};
  load_slices(from, 1, part.bytes(), arrived);
  const Body<Pack> in(reinterpret_cast<const Pack*>(memory), source.past);

  Statistics own = {PEEL ? fmaxf(LEAST, edge) : LEAST, 0.0f};
#pragma unroll 4
  for (int i = threadIdx.x; i < part.vecs; i += THREADS)
    own.top = fmaxf(own.top, wide_max(in[i]));
  own.top = warp_max(own.top);
  // Each warp uses its own maximum first; block_merge and cluster_gather rescale the totals.
  const Exponent block_exponent(own.top);
  own.total = block_exponent.direct ? total_of<true>(in, part.vecs, block_exponent)
                           : total_of<false>(in, part.vecs, block_exponent);
  if (PEEL) own.total += exp_of_difference(edge, own.top);
  own.total = warp_sum(own.total);
  const Statistics block = block_merge(own, scratch);
  const Statistics peer = cluster_gather(block, peers, {LEAST, 0.0f}, arrived + 1);
  const float top = warp_max(peer.top);
  const float scale = __frcp_rn(warp_sum(peer.total * exp_of_difference(peer.top, top)));

  Pack* out = reinterpret_cast<Pack*>(y + part.from);
  if (edge_column >= 0) y[edge_column] = from_float<WEFT_T>(exp_of_difference(edge, top) * scale);
  const Exponent row_exponent(top);
  if (row_exponent.direct)
    write<true>(in, out, part.vecs, row_exponent, scale);
  else
    write<false>(in, out, part.vecs, row_exponent, scale);
}

#else

// grad: (rows, columns), rows `stride` apart; y, dx: (rows, columns) contiguous. One cluster a row.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, MIN_BLOCKS)
softmax_backward_shared(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                        WEFT_T* __restrict__ dx, index_t columns, index_t stride) {
  __shared__ unsigned long long arrived[2];
  __shared__ float scratch[32];
  __shared__ float peers[CLUSTER];
  const Slice part(dx, columns);
  grad += part.row * stride;
  y += part.row * columns;
  dx += part.row * columns;
  const Body<Pack> g_source(grad + part.from), y_source(y + part.from);
  const int edge_column = part.edge_column();
  const float g_edge = edge_column >= 0 ? to_float(grad[edge_column]) : 0.0f;
  const float y_edge = edge_column >= 0 ? to_float(y[edge_column]) : 0.0f;
  const Pack* const from[] = {g_source.base, y_source.base};
  load_slices(from, 2, part.bytes(), arrived);
  const Body<Pack> g(reinterpret_cast<const Pack*>(memory), g_source.past);
  const Body<Pack> out(reinterpret_cast<const Pack*>(memory + part.bytes()), y_source.past);

  float dot = g_edge * y_edge;
#pragma unroll 4
  for (int i = threadIdx.x; i < part.vecs; i += THREADS) dot += pack_dot(g[i], out[i]);
  dot = block_sum(dot, scratch);
  dot = warp_sum(cluster_gather(dot, peers, 0.0f, arrived + 1));

  Pack* to = reinterpret_cast<Pack*>(dx + part.from);
  if (edge_column >= 0) dx[edge_column] = from_float<WEFT_T>(y_edge * (g_edge - dot));
#pragma unroll 4
  for (int i = threadIdx.x; i < part.vecs; i += THREADS) {
    const Pack p = g[i], q = out[i];
    to[i] = packed([&](int j) { return element(q, j) * (element(p, j) - dot); });
  }
}

#endif
#endif
