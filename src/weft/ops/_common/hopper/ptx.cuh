// Hopper's instructions as functions, one each (sm_90a). Source: NVIDIA's PTX ISA 8.x.
//
// All inline assembly of the library stands here and in wgmma_*shapes.cuh, so that an emulator can define the
// same functions on a CPU (tests/helpers/hopper_emulator.hpp). Addresses of shared memory are 32-bit.
#pragma once
#ifndef WEFT_HOPPER_EMULATED
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define CLUSTER_DIMENSIONS(blocks) __cluster_dims__(blocks, 1, 1)

namespace hopper {

// A description of a tensor in global memory for the copy engine (TMA), made by the host
// (cuTensorMapEncodeTiled). A kernel gets it in a __grid_constant__ parameter.
struct alignas(64) TensorMap { unsigned long long opaque[16]; };

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// ---- Barriers in shared memory (mbarrier)

// The phase completes after `count` arrivals and all bytes that were announced for it.
__device__ __forceinline__ void mbarrier_init(unsigned mbarrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the cluster and to the copy engine. Other threads of the block need
// a barrier (__syncthreads) after it.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}

// Arrives at the barrier that block `rank` of the cluster has at this address. It orders this thread's reads
// of its own shared memory, and nothing else: an arrival with the scope of the cluster (.release.cluster)
// compiles to a fence of the whole GPU (MEMBAR.ALL.GPU) before each arrival. In the main loop of a product
// such fences take as long as the products do.
__device__ __forceinline__ void mbarrier_arrive_at(unsigned mbarrier, unsigned rank) {
  asm volatile(
      "{\n .reg .b32 remote;\n"
      " mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(mbarrier),
      "r"(rank)
      : "memory");
}

// Arrives and announces `bytes` that copies will bring in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned mbarrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes)
               : "memory");
}

// Returns true once the phase of this parity (0, 1, 0, ...) has completed; false also when it gave up
// waiting.
__device__ __forceinline__ bool mbarrier_try_wait(unsigned mbarrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(mbarrier), "r"(parity)
      : "memory");
  return done;
}

// ---- Copy engine (TMA)

__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Issues the copy of one box from global to shared memory; its bytes count on `mbarrier`. (x, y) is the
// box's first element, x along the contiguous dimension. Elements outside of the tensor become 0.
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap* map, int x, int y, unsigned mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(mbarrier)
      : "memory");
}

// The same, to this place in the shared memory of each block of the cluster whose bit is set in `blocks`; the
// bytes count on each block's barrier at this address.
__device__ __forceinline__ void tma_load_multicast(unsigned to, const TensorMap* map, int x, int y,
                                                   unsigned mbarrier, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(mbarrier), "h"(blocks)
      : "memory");
}

// Issues the copy of one box from shared to global memory; elements outside of the tensor are not written.
// The writes to shared memory come before it only behind fence_async_proxy() of their threads and a barrier.
__device__ __forceinline__ void tma_store(const TensorMap* map, unsigned from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y)
               : "memory");
}

// The same for tensors of four dimensions, whose boxes are matrices: one element along the last two, z and w.
// Elements outside of the tensor are those beyond the end of any dimension.
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap* map, int x, int y, int z, int w,
                                         unsigned mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(mbarrier)
      : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap* map, unsigned from, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Copies of adjacent bytes, a multiple of 16: a load whose bytes count on `mbarrier`, a store, and an
// addition of float32 numbers to those in global memory.
__device__ __forceinline__ void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(mbarrier)
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, unsigned from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_add(float* to, unsigned from, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}

// Makes this thread's stores so far one group.
__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups have not read their shared memory yet.
template <int PENDING> __device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until at most PENDING of this thread's groups are not complete.
template <int PENDING> __device__ __forceinline__ void tma_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Orders this thread's writes to shared memory before what the copy engine and wgmma read after it.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Tensor cores (wgmma); the products themselves are in wgmma_shapes.cuh

// Orders accesses to registers and shared memory before the next product. Needed before the first product
// and wherever its registers were written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes the products so far one group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most PENDING groups are not complete. Until then their accumulators may not be touched.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Tells the compiler that these registers change here: no access to them moves across. It stands behind the
// wait for the products that write (accumulators) or read them (a factor); an access that the compiler moved
// before the wait would make ptxas wait after every product (warning C7510).
template <int COUNT> __device__ __forceinline__ void pin_registers(float (&r)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int ROWS, int COUNT> __device__ __forceinline__ void pin_registers(unsigned (&r)[ROWS][COUNT]) {
#pragma unroll
  for (int i = 0; i < ROWS * COUNT; ++i) asm volatile("" : "+r"(r[i / COUNT][i % COUNT])::"memory");
}
__device__ __forceinline__ void pin_register(unsigned& r) { asm volatile("" : "+r"(r)::"memory"); }

// Stores four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8, and
// holds elements 2 (l % 4) and the next of row l / 4 of each matrix.
__device__ __forceinline__ void store_matrices(unsigned to, unsigned r0, unsigned r1, unsigned r2,
                                               unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// The same, each matrix transposed: lane l gives the address of column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(unsigned to, unsigned r0, unsigned r1, unsigned r2,
                                                          unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

__device__ __forceinline__ unsigned load_word(unsigned from) {
  unsigned word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

__device__ __forceinline__ void store_word(unsigned to, unsigned word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// Reads a number that another block has written by store_release(), with all that it wrote before, also by
// the copy engine. What the copy engine does after it comes after it: the fence is of global memory alone, as
// one of all memory would wait for the whole GPU (MEMBAR.ALL.GPU) at each look.
__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n fence.proxy.async.global;"
               : "=r"(value)
               : "l"(from)
               : "memory");
  return value;
}
// Writes by the copy engine come before it where this thread has waited for them (tma_wait).
__device__ __forceinline__ void store_release(int* to, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Loads and stores numbers that are adjacent in shared memory.
__device__ __forceinline__ void load_two(float (&to)[2], unsigned from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_four(float (&to)[4], unsigned from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void store_four(unsigned to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Stores 16 bytes of zeros.
__device__ __forceinline__ void store_zeros(unsigned to) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

// ---- Arithmetic

// 2^x: 0 for -inf; denormal results are 0.
__device__ __forceinline__ float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// log2(x): -inf for 0 and for denormal numbers.
__device__ __forceinline__ float binary_logarithm(float x) {
  float logarithm;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
  return logarithm;
}

// 1 / x, to one unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(x));
  return quotient;
}

// Rounds two values and packs them, `low` in the lower half.
template <typename T> __device__ __forceinline__ unsigned rounded_pair(float low, float high);
template <> __device__ __forceinline__ unsigned rounded_pair<__nv_bfloat16>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <> __device__ __forceinline__ unsigned rounded_pair<__half>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Two words at a multiple of 8 bytes.
__device__ __forceinline__ void store_words(unsigned to, unsigned first, unsigned second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second) : "memory");
}

// ---- Clusters

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of the cluster. The warp need not be converged.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}

// The place that this address of shared memory has in block `rank` of the cluster.
__device__ __forceinline__ unsigned in_block(unsigned at, unsigned rank) {
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at), "r"(rank));
  return remote;
}

// Stores four numbers in another block, asynchronously: 16 bytes count on its `mbarrier`, through which its
// threads see them. Both places are of in_block(). It waits for nothing, and needs this block no longer.
__device__ __forceinline__ void send_four(unsigned to, unsigned mbarrier, float a, float b, float c,
                                          float d) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
      " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(mbarrier)
      : "memory");
}

// ---- Warps and registers

// True in one thread of the warp, the same each time.
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile(
      "{\n .reg .pred p;\n"
      " elect.sync _|p, 0xffffffff;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected;
}

// Sets the registers of each thread of a warp group, all of whose warps execute it.
template <int COUNT> __device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Waits for `threads` threads at barrier `id` (1 to 15; 0 is that of __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives there without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace hopper

#include "wgmma_shapes.cuh"
#endif
