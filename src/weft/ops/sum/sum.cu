// The sum of n elements in one launch, in a fixed order.
//
// A thread loads UNROLL 16-byte vectors before it uses the first. It adds their elements by a tree in float
// (double stays double) and adds only that result to a running sum in double. Each block writes one partial
// sum; the block that finishes last adds them up. A double addition for every UNROLL vectors costs nothing
// beside the loads, and the error does not grow with n. Bytes: n read, 8 for each block written and read
// again.
#include "numeric.cuh"
#include "reduce.cuh"

#ifndef UNROLL
#define UNROLL 4
#endif
#ifndef THREADS
#define THREADS 256
#endif
// Blocks that must fit on an SM at once: bounds the registers of a thread, of which an SM has 65536.
#ifndef RESIDENT
#define RESIDENT 1
#endif
// Cache policy of the loads. 0: the compiler's. 1: not allocated in the L1, since no element is read twice.
// 2: as 1, and evicted first from the L2, so that the sum does not displace other data there.
#ifndef HINT
#define HINT 1
#endif

constexpr int N = Wide<WEFT_T>::N;
constexpr int TILE = THREADS * UNROLL;  // vectors that a block loads at once
constexpr int WARPS = THREADS / 32;
constexpr int TICKETS = 4096;
using Pack = Vector<WEFT_T, N>;
static_assert((UNROLL & (UNROLL - 1)) == 0 && THREADS % 32 == 0, "trees need powers of two");

// Counters of finished blocks. All are 0 when the module is loaded, and each call leaves its own at 0.
__device__ unsigned int tickets[TICKETS];

struct AddDouble {
  static __device__ __forceinline__ double nothing() { return 0.0; }
  static __device__ __forceinline__ double merge(double a, double b) { return a + b; }
};

__device__ __forceinline__ double widen(double v) { return v; }
template <typename T> __device__ __forceinline__ float widen(T v) { return to_float(v); }
using Narrow = decltype(widen(WEFT_T()));  // type in which one tile's elements are added: float or double

// The only rounding to the output's type. float16 and bfloat16 go through float: double rounding can differ
// from one rounding by an ulp only at exact ties of the float.
__device__ __forceinline__ void round_to(double v, double* y) { *y = v; }
template <typename T> __device__ __forceinline__ void round_to(double v, T* y) {
  *y = from_float<T>((float)v);
}

__device__ __forceinline__ Pack load(const Pack* p) {
#if HINT == 0
  return *p;
#else
  union { uint4 raw; Pack pack; } v;
#if HINT == 1
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.raw.x), "=r"(v.raw.y), "=r"(v.raw.z), "=r"(v.raw.w) : "l"(p));
#else
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.raw.x), "=r"(v.raw.y), "=r"(v.raw.z), "=r"(v.raw.w)
               : "l"(p), "l"(policy));
#endif
  return v.pack;
#endif
}

// Return v[0] + ... + v[COUNT - 1], added by a tree in place: an error of log2(COUNT) roundings, not COUNT.
template <int COUNT> __device__ __forceinline__ Narrow tree(Narrow (&v)[COUNT]) {
#pragma unroll
  for (int half = COUNT / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

__device__ __forceinline__ Narrow sum_of(const Pack& pack) {
  Narrow v[N];
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = widen(pack.at[j]);
  return tree(v);
}

__device__ __forceinline__ Narrow sum_of(const Pack (&in)[UNROLL]) {
  Narrow v[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) v[i] = sum_of(in[i]);
  return tree(v);
}

__device__ __forceinline__ void load_tile(Pack (&in)[UNROLL], const Pack* tile) {
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) in[i] = load(tile + i * THREADS + threadIdx.x);
}

// Return the sum over the block in thread 0; the other threads get no useful value. `shared` may be used
// again after the next __syncthreads().
__device__ __forceinline__ double block_sum(double v, double* shared) {
  v = warp_reduce<AddDouble>(v);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  // A whole warp takes part, since the shuffles name all 32 lanes; lanes past the last warp add 0.
  if (threadIdx.x < 32) v = warp_reduce<AddDouble>(threadIdx.x < WARPS ? shared[threadIdx.x] : 0.0);
  return v;
}

// Return the sum of this thread's part of x: full tiles blockIdx.x, blockIdx.x + gridDim.x, ... One block
// also adds what no full tile covers: some vectors, and up to N - 1 elements on either side. It is the block
// that would have the next tile, since it has at most as many tiles as the others.
__device__ __forceinline__ double share(const WEFT_T* __restrict__ x, index_t n) {
  // x may begin at any element (a view with an offset): vectors start at the next 16-byte boundary.
  const index_t before = ((16 - (reinterpret_cast<size_t>(x) & 15)) & 15) / sizeof(WEFT_T);
  const index_t head = before < n ? before : n;
  const Pack* wide = reinterpret_cast<const Pack*>(x + head);
  const index_t vectors = (n - head) / N;
  const index_t tiles = vectors / TILE;
  double total = 0.0;
  Pack in[UNROLL];
  // A tile's loads are issued at the end of the round before: were loads and sums in one round, the
  // compiler, to save registers, would hold loads back until others have been used.
  index_t tile = blockIdx.x;
  if (tile < tiles) load_tile(in, wide + tile * TILE);
  while (tile < tiles) {
    const Narrow sum = sum_of(in);
    tile += gridDim.x;
    if (tile < tiles) load_tile(in, wide + tile * TILE);
    total += (double)sum;
  }
  if (blockIdx.x == tiles % gridDim.x) {
    for (index_t v = tiles * TILE + threadIdx.x; v < vectors; v += THREADS)
      total += (double)sum_of(load(wide + v));
    if (threadIdx.x < head) total += (double)widen(x[threadIdx.x]);
    const index_t tail = head + vectors * N + threadIdx.x;
    if (tail < n) total += (double)widen(x[tail]);
  }
  return total;
}

// x: (n,), aligned as its type; y: one element; partials: (gridDim.x,). `slot` is the index of a ticket that
// no other call in flight uses; _ticket in with_cuda.py chooses it.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
sum_once(const WEFT_T* __restrict__ x, WEFT_T* y, double* partials, index_t n, index_t slot) {
  __shared__ double shared[WARPS];
  __shared__ bool last;
  const double mine = block_sum(share(x, n), shared);
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = mine;
    __threadfence();  // release: the partial sum is visible to the device before the ticket counts it
    // atomicInc wraps to 0 after gridDim.x - 1, so that the last block resets the ticket without a store.
    last = atomicInc(&tickets[slot], gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();  // acquire: every block's partial sum is visible from here on
  double total = 0.0;
  // __ldcg reads the L2, where the other blocks' stores are; this SM's L1 may have stale lines. The order of
  // the additions depends on the indices alone, so that each run gives the same bits.
  for (unsigned int i = threadIdx.x; i < gridDim.x; i += THREADS) total += __ldcg(partials + i);
  total = block_sum(total, shared);
  if (threadIdx.x == 0) round_to(total, y);
}

// The same in two launches, for calls that get no ticket: partial sums, then one block adds them.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
sum_tiles(const WEFT_T* __restrict__ x, double* partials, index_t n) {
  __shared__ double shared[WARPS];
  const double mine = block_sum(share(x, n), shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = mine;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sum_partials(const double* __restrict__ partials, WEFT_T* y, index_t count) {
  __shared__ double shared[WARPS];
  double total = 0.0;
  for (index_t i = threadIdx.x; i < count; i += THREADS) total += partials[i];
  total = block_sum(total, shared);
  if (threadIdx.x == 0) round_to(total, y);
}
