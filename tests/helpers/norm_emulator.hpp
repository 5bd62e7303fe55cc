// Emulator of a CUDA device on a CPU, for the kernels of the norms and of softmax.
//
// Each thread is a fiber (ucontext), and the scheduler picks the next one at random. Emulated are barriers,
// shuffles, the blocks of a cluster and their access to each other's shared memory; a bulk copy lands at a
// random time between its issue and a wait for it. Each of these ends the process with its name: a copy that
// is not aligned to 16 bytes or leaves shared memory, a copy that nothing waits for, a write past shared
// memory, a deadlock. Shared memory holds NaN at first. A kernel's text follows this file; headers of inline
// assembly are left out, because their functions are defined here.
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __CUDA_ARCH__ 900
#define threadIdx (Index{self->thread})
#define blockIdx (Index{self->block->index})
#define memory (self->block->dynamic.data())
using std::max;
using std::min;
typedef long long index_t;
struct Index { unsigned x, y = 0; };  // one block along y
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
static uint4 __ldcs(const uint4* from) { return *from; }
struct Fiber;
struct Barrier { int expected = 0, arrived = 0; std::vector<Fiber*> waiting; };
struct Cluster;
struct Block {
  unsigned index;
  Cluster* cluster;
  std::vector<unsigned char> fixed, dynamic;
  std::vector<float> slots;
  Barrier all;
  Barrier named[16], warps[32];
  bool started = false;
};
struct Cluster {
  std::vector<Block*> blocks;
  std::vector<Fiber*> waiting;
  int threads = 0, arrived = 0;
  unsigned phase = 0;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(32 << 10);
  Block* block;
  unsigned thread, parity = 0, awaited = 0;
  bool done = false;
};
struct PendingCopy { void* to; const void* from; int bytes; unsigned long long* arrived; };
struct Arrivals { int bytes; unsigned char left, expected, phase; };
constexpr int GUARD = 4096, FIXED = 16 << 10;
static Fiber* self;
static ucontext_t scheduler;
static std::vector<Fiber*> ready;
static std::vector<PendingCopy> pending_copies;
static std::deque<float> sent_values;
static Index gridDim, blockDim;
static int dynamic_bytes, offsets[64], fixed_bytes = 0;
static uint64_t random_state;
static void (*body)();

[[noreturn]] static void fail(const char* what) { fprintf(stderr, "%s\n", what); abort(); }
static unsigned random_below(unsigned n) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (unsigned)(random_state >> 33) % n;
}
static void yield_fiber() { swapcontext(&self->context, &scheduler); }
static void wait_at(Barrier& m) {
  if (++m.arrived == m.expected) {
    m.arrived = 0;
    ready.insert(ready.end(), m.waiting.begin(), m.waiting.end());
    m.waiting.clear();
    ready.push_back(self);
  } else {
    m.waiting.push_back(self);
  }
  yield_fiber();
}
static void __syncthreads() { wait_at(self->block->all); }
static void __syncwarp() { wait_at(self->block->warps[self->thread / 32]); }
static void named_barrier(int id, int count) {
  if (id < 1 || id > 15) fail("a barrier of a number that a block does not have");
  self->block->named[id].expected = count;
  wait_at(self->block->named[id]);
}
static void cluster_arrive() {
  Cluster& c = *self->block->cluster;
  self->awaited = c.phase;
  if (++c.arrived < c.threads) return;
  c.arrived = 0, ++c.phase;
  ready.insert(ready.end(), c.waiting.begin(), c.waiting.end());
  c.waiting.clear();
}
static void cluster_wait() {
  Cluster& c = *self->block->cluster;
  (c.phase == self->awaited ? c.waiting : ready).push_back(self);
  yield_fiber();
}
static void cluster_arrive_relaxed() { cluster_arrive(); }
static void cluster_barrier() { cluster_arrive(), cluster_wait(); }
static void store_to_block(int rank, float* own, float value) {
  if (!self->block->cluster->blocks[rank]->started) fail("a write to a block that may not run yet");
  const auto at = (unsigned char*)own - self->block->fixed.data();
  *(float*)(self->block->cluster->blocks[rank]->fixed.data() + at) = value;
}
static float exchange(float v, int from) {  // two slots a lane in alternation: one barrier is enough
  const int warp = self->thread / 32;
  float* slot = &self->block->slots[(warp * 2 + (self->parity ^= 1)) * 32];
  slot[self->thread % 32] = v;
  wait_at(self->block->warps[warp]);
  return slot[from];
}
static float __shfl_xor_sync(unsigned, float v, int step) {
  return exchange(v, self->thread % 32 ^ step);
}
static float __shfl_sync(unsigned, float v, int lane) { return exchange(v, lane); }
static void* declared(int id, size_t bytes) {  // a `__shared__` of the source
  if (!offsets[id]) {
    offsets[id] = fixed_bytes + 128;
    if ((fixed_bytes += (bytes + 255) / 128 * 128) > FIXED) fail("too much declared shared memory");
  }
  return self->block->fixed.data() + offsets[id];
}
static void complete_phase(Arrivals* a) {
  if (a->left == 0 && a->bytes == 0) a->phase ^= 1, a->left = a->expected;
}
static void complete_copy(unsigned k) {
  const PendingCopy c = pending_copies[k];
  pending_copies[k] = pending_copies.back();
  pending_copies.pop_back();
  memcpy(c.to, c.from, c.bytes);
  ((Arrivals*)c.arrived)->bytes -= c.bytes;
  complete_phase((Arrivals*)c.arrived);
}
static void init_mbarriers(unsigned long long* a, int count = 1, int arrivals = 1) {
  const auto n = (unsigned char)arrivals;
  for (int k = 0; k < count; ++k) *(Arrivals*)(a + k) = {0, n, n, 0};
}
static void mbarrier_arrive(unsigned long long* arrived) {
  auto* a = (Arrivals*)arrived;
  if (a->left == 0) fail("an arrival too many");
  a->left -= 1;
  complete_phase(a);
}
static void mbarrier_expect_bytes(unsigned long long* arrived, int bytes) {
  auto* a = (Arrivals*)arrived;
  a->bytes += bytes, a->left -= 1;
  complete_phase(a);
}
static void bulk_copy(void* to, const void* from, int bytes, unsigned long long* arrived) {
  const auto at = (unsigned char*)to - memory;
  if (bytes <= 0 || bytes % 16 || (uintptr_t)from % 16 || at % 16) fail("a copy off 16 bytes");
  if (at < 0 || at + bytes > dynamic_bytes) fail("a copy past shared memory");
  pending_copies.push_back({to, from, bytes, arrived});
  if (random_below(3) == 0) complete_copy(pending_copies.size() - 1);
}
// A store of 4 bytes that lands at a random time, possibly before the mbarrier expects its bytes.
static void send_to_block(int rank, float* own, float value, unsigned long long* arrived) {
  Block& target = *self->block->cluster->blocks[rank];
  if (!target.started) fail("a write to a block that may not run yet");
  const auto moved = [&](void* p) {
    return target.fixed.data() + ((unsigned char*)p - self->block->fixed.data());
  };
  sent_values.push_back(value);
  pending_copies.push_back({moved(own), &sent_values.back(), 4, (unsigned long long*)moved(arrived)});
}
static void mbarrier_wait(unsigned long long* arrived, unsigned phase) {
  for (int attempts = 0; (unsigned)((Arrivals*)arrived)->phase == phase; ++attempts) {
    if (attempts == 50000) fail("a wait that does not end");
    if (!pending_copies.empty() && random_below(2)) complete_copy(random_below(pending_copies.size()));
    ready.push_back(self);
    yield_fiber();
  }
}
static void run_fiber() { self->block->started = true; body(); self->done = true; yield_fiber(); }
static void run_cluster(Cluster& cluster, unsigned first, int blocks, int threads) {
  std::vector<Block> blocks_of_cluster(blocks);
  std::vector<Fiber> fibers(blocks * threads);
  cluster.threads = blocks * threads;
  for (int k = 0; k < blocks * threads; ++k) {
    Block& b = blocks_of_cluster[k / threads];
    if (k % threads == 0) {
      b.index = first + k / threads, b.cluster = &cluster, b.all.expected = threads;
      b.fixed.assign(FIXED, 0xff), b.dynamic.assign(dynamic_bytes + GUARD, 0xff);
      b.slots.resize(2 * threads);
      for (auto& w : b.warps) w.expected = 32;
      cluster.blocks.push_back(&b);
    }
    Fiber& f = fibers[k];
    f.block = &b, f.thread = k % threads;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
    makecontext(&f.context, run_fiber, 0);
    ready.push_back(&f);
  }
  const Fiber* delayed_warp = &fibers[0];
  // In half of the runs one block of the cluster starts long after the others.
  const Block* delayed_block = random_below(2) ? &blocks_of_cluster[random_below(blocks)] : nullptr;
  unsigned delay_steps = 20 * threads * blocks;
  for (size_t left = fibers.size(); left; left -= self->done) {
    if (ready.empty()) fail("a deadlock");
    // One warp at a time is delayed, so that the others run as far ahead as barriers let them.
    if (random_below(2000) == 0) delayed_warp = &fibers[random_below(fibers.size() / 32) * 32];
    unsigned k = random_below(ready.size());
    for (int t = 0; t < 8 && (ready[k] - delayed_warp) / 32 == 0 && ready[k] >= delayed_warp; ++t)
      k = random_below(ready.size());
    if (delay_steps && --delay_steps && delayed_block)
      for (int t = 0; t < 64 && ready[k]->block == delayed_block; ++t) k = random_below(ready.size());
    self = ready[k], ready[k] = ready.back(), ready.pop_back();
    swapcontext(&scheduler, &self->context);
  }
  if (!pending_copies.empty()) fail("a copy that nothing waited for");
  for (auto& b : blocks_of_cluster)
    for (int k = 0; k < GUARD; ++k)
      if (b.dynamic[dynamic_bytes + k] != 0xff) fail("a write past shared memory");
}
static void launch(int grid, int cluster_size, int threads, int bytes, uint64_t seed) {
  gridDim = {(unsigned)grid, 1}, blockDim = {(unsigned)threads}, dynamic_bytes = bytes, random_state = seed;
  for (int first = 0; first < grid; first += cluster_size) {
    Cluster cluster;
    run_cluster(cluster, first, cluster_size, threads);
  }
}

// CUDA functions and types that the kernels' own headers use.
static float __frcp_rn(float v) { return 1.0f / v; }
static float __fsqrt_rn(float v) { return std::sqrt(v); }
static float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
static float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
static float __int_as_float(int v) { float f; memcpy(&f, &v, 4); return f; }
static float __fmul_rn(float a, float b) { return a * b; }
static unsigned __vibmax_u16x2(unsigned a, unsigned b, bool* high, bool* low) {
  *high = a >> 16 >= b >> 16, *low = (a & 0xffff) >= (b & 0xffff);
  return (max(a >> 16, b >> 16) << 16) | max(a & 0xffff, b & 0xffff);
}
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (bits & 31));
}
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct __half;
static float to_float(float v) { return v; }
template <typename T> static T from_float(float v) { return v; }
template <typename T, int N> struct alignas(sizeof(T) * N) Vector { T at[N]; };
template <typename T, int N> static float element(const Vector<T, N>& v, int j) {
  return to_float(v.at[j]);
}
