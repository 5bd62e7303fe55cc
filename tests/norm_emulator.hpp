// The norms' kernels on a CPU: a thread is a fiber, and which one goes on is drawn anew each time.
//
// Barriers, shuffles, the blocks of a cluster and each other's shared memory; bulk copies land at
// any time between their asking and a wait for them. A copy off 16 bytes or past shared memory, a
// copy nobody waits for, writes past shared memory and a deadlock end the process with their name.
// Shared memory holds NaNs at first. Included before a kernel whose asm headers are left out.
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
struct Index { unsigned x; };
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
static uint4 __ldcs(const uint4* from) { return *from; }
struct Fiber;
struct Meeting { int expected = 0, arrived = 0; std::vector<Fiber*> waiting; };
struct Cluster;
struct Block {
  unsigned index;
  Cluster* cluster;
  std::vector<unsigned char> fixed, dynamic;
  std::vector<float> slots;
  Meeting all;
  Meeting named[16], warps[32];
  bool begun = false;
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
struct Copying { void* to; const void* from; int bytes; unsigned long long* arrived; };
struct Arrivals { int bytes; short left, phase; };
constexpr int GUARD = 4096, FIXED = 16 << 10;
static Fiber* self;
static ucontext_t scheduler;
static std::vector<Fiber*> ready;
static std::vector<Copying> copying;
static std::deque<float> sent;
static Index gridDim, blockDim;
static int dynamic_bytes, places[64], used = 0;
static uint64_t drawn;
static void (*body)();

[[noreturn]] static void fail(const char* what) { fprintf(stderr, "%s\n", what); abort(); }
static unsigned dice(unsigned n) {
  drawn = drawn * 6364136223846793005u + 1442695040888963407u;
  return (unsigned)(drawn >> 33) % n;
}
static void leave() { swapcontext(&self->context, &scheduler); }
static void meet(Meeting& m) {
  if (++m.arrived == m.expected) {
    m.arrived = 0;
    ready.insert(ready.end(), m.waiting.begin(), m.waiting.end());
    m.waiting.clear();
    ready.push_back(self);
  } else {
    m.waiting.push_back(self);
  }
  leave();
}
static void __syncthreads() { meet(self->block->all); }
static void __syncwarp() { meet(self->block->warps[self->thread / 32]); }
static void named_barrier(int id, int count) {
  if (id < 1 || id > 15) fail("a barrier of a number that a block does not have");
  self->block->named[id].expected = count;
  meet(self->block->named[id]);
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
  leave();
}
static void cluster_arrive_relaxed() { cluster_arrive(); }
static void cluster_barrier() { cluster_arrive(), cluster_wait(); }
static void write_to(int rank, float* own, float value) {
  if (!self->block->cluster->blocks[rank]->begun) fail("a write to a block that may not run yet");
  const auto at = (unsigned char*)own - self->block->fixed.data();
  *(float*)(self->block->cluster->blocks[rank]->fixed.data() + at) = value;
}
static float exchanged(float v, int from) {  // two slots a lane, by turns: one meeting is enough
  const int warp = self->thread / 32;
  float* slot = &self->block->slots[(warp * 2 + (self->parity ^= 1)) * 32];
  slot[self->thread % 32] = v;
  meet(self->block->warps[warp]);
  return slot[from];
}
static float __shfl_xor_sync(unsigned, float v, int step) {
  return exchanged(v, self->thread % 32 ^ step);
}
static float __shfl_sync(unsigned, float v, int lane) { return exchanged(v, lane); }
static void* declared(int id, size_t bytes) {  // a `__shared__` of the source
  if (!places[id]) {
    places[id] = used + 128;
    if ((used += (bytes + 255) / 128 * 128) > FIXED) fail("too much declared shared memory");
  }
  return self->block->fixed.data() + places[id];
}
static void settle(Arrivals* a) {
  if (a->left == 0 && a->bytes == 0) a->phase ^= 1, a->left = 1;
}
static void land(unsigned k) {
  const Copying c = copying[k];
  copying[k] = copying.back();
  copying.pop_back();
  memcpy(c.to, c.from, c.bytes);
  ((Arrivals*)c.arrived)->bytes -= c.bytes;
  settle((Arrivals*)c.arrived);
}
static void prepare(unsigned long long* a, int count = 1) {
  for (int k = 0; k < count; ++k) *(Arrivals*)(a + k) = {0, 1, 0};
}
static void expect(unsigned long long* arrived, int bytes) {
  auto* a = (Arrivals*)arrived;
  a->bytes += bytes, a->left -= 1;
  settle(a);
}
static void copy(void* to, const void* from, int bytes, unsigned long long* arrived) {
  const auto at = (unsigned char*)to - memory;
  if (bytes <= 0 || bytes % 16 || (uintptr_t)from % 16 || at % 16) fail("a copy off 16 bytes");
  if (at < 0 || at + bytes > dynamic_bytes) fail("a copy past shared memory");
  copying.push_back({to, from, bytes, arrived});
  if (dice(3) == 0) land(copying.size() - 1);
}
// Of 4 bytes, which land at any time; the barrier may be told of them before it expects them.
static void send(int rank, float* own, float value, unsigned long long* arrived) {
  Block& there = *self->block->cluster->blocks[rank];
  if (!there.begun) fail("a write to a block that may not run yet");
  const auto moved = [&](void* p) {
    return there.fixed.data() + ((unsigned char*)p - self->block->fixed.data());
  };
  sent.push_back(value);
  copying.push_back({moved(own), &sent.back(), 4, (unsigned long long*)moved(arrived)});
}
static void wait(unsigned long long* arrived, unsigned phase) {
  for (int turns = 0; (unsigned)((Arrivals*)arrived)->phase == phase; ++turns) {
    if (turns == 50000) fail("a wait that does not end");
    if (!copying.empty() && dice(2)) land(dice(copying.size()));
    ready.push_back(self);
    leave();
  }
}
static void enter() { self->block->begun = true; body(); self->done = true; leave(); }
static void run_cluster(Cluster& whole, unsigned first, int blocks, int threads) {
  std::vector<Block> made(blocks);
  std::vector<Fiber> fibers(blocks * threads);
  whole.threads = blocks * threads;
  for (int k = 0; k < blocks * threads; ++k) {
    Block& b = made[k / threads];
    if (k % threads == 0) {
      b.index = first + k / threads, b.cluster = &whole, b.all.expected = threads;
      b.fixed.assign(FIXED, 0xff), b.dynamic.assign(dynamic_bytes + GUARD, 0xff);
      b.slots.resize(2 * threads);
      for (auto& w : b.warps) w.expected = 32;
      whole.blocks.push_back(&b);
    }
    Fiber& f = fibers[k];
    f.block = &b, f.thread = k % threads;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
    makecontext(&f.context, enter, 0);
    ready.push_back(&f);
  }
  const Fiber* late = &fibers[0];
  // Half the time one block of the cluster begins long after the others.
  const Block* asleep = dice(2) ? &made[dice(blocks)] : nullptr;
  unsigned turns = 20 * threads * blocks;
  for (size_t left = fibers.size(); left; left -= self->done) {
    if (ready.empty()) fail("a deadlock");
    // One warp at a time is held back, so that the others run as far ahead as barriers let them.
    if (dice(2000) == 0) late = &fibers[dice(fibers.size() / 32) * 32];
    unsigned k = dice(ready.size());
    for (int t = 0; t < 8 && (ready[k] - late) / 32 == 0 && ready[k] >= late; ++t)
      k = dice(ready.size());
    if (turns && --turns && asleep)
      for (int t = 0; t < 64 && ready[k]->block == asleep; ++t) k = dice(ready.size());
    self = ready[k], ready[k] = ready.back(), ready.pop_back();
    swapcontext(&scheduler, &self->context);
  }
  if (!copying.empty()) fail("a copy that nobody waited for");
  for (auto& b : made)
    for (int k = 0; k < GUARD; ++k)
      if (b.dynamic[dynamic_bytes + k] != 0xff) fail("a write past shared memory");
}
static void launch(int grid, int cluster, int threads, int bytes, uint64_t seed) {
  gridDim = {(unsigned)grid}, blockDim = {(unsigned)threads}, dynamic_bytes = bytes, drawn = seed;
  for (int first = 0; first < grid; first += cluster) {
    Cluster whole;
    run_cluster(whole, first, cluster, threads);
  }
}

// What the kernels' own headers have of CUDA's.
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
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct __half;
static float to_float(float v) { return v; }
template <typename T> static T from_float(float v) { return v; }
template <typename T, int N> struct alignas(sizeof(T) * N) Vector { T at[N]; };
template <typename T, int N> static float element(const Vector<T, N>& v, int j) {
  return to_float(v.at[j]);
}
