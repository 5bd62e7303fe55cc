// Threads as fibers: a thread runs until it must wait for others. Barriers, warp functions and atomics.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "state.hpp"

struct Index { unsigned x, y, z; };
Index threadIdx, blockIdx, blockDim, gridDim;  // constant for the learner's file

namespace weft { char weft_guard_before[GUARD_SHARED] __attribute__((section("weft_shared"), aligned(128))); }

namespace weft {
uint32_t current_thread, current_block, threads_per_block;
uint32_t block_sync_time, warp_sync_time[LANES];
std::vector<uint32_t> fence_time;
char* stacks;

enum State : uint8_t { READY, AT_BARRIER, IN_WARP, DONE };
struct Fiber {
  ucontext_t start;
  jmp_buf position;
  bool is_started;
  State state;
  const void* pc;      // of the barrier or warp function that it waits in
  unsigned mask;
  uint64_t steps;
};
// A warp function for one mask: lanes that have arrived, their values, and the values of the last meeting.
struct Meeting { unsigned arrived = 0; uint64_t generation = 0, values[2][LANES]; };
static Fiber fibers[MAX_THREADS];
static std::map<unsigned, Meeting> meetings[LANES];
static jmp_buf scheduler, block_exit;
static void (*body)(void*);
static void* body_argument;
static bool made_progress;

static Index thread_index(uint32_t t) {
  return {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
}
static std::string text(Index i, const Index& size) {
  if (size.y == 1 && size.z == 1) return std::to_string(i.x);
  std::string s = "(" + std::to_string(i.x) + ", " + std::to_string(i.y);
  return s + (size.z > 1 ? ", " + std::to_string(i.z) + ")" : ")");
}
std::string thread_name(uint32_t block, uint32_t t) {
  const Index b = {block % gridDim.x, block / gridDim.x % gridDim.y, block / (gridDim.x * gridDim.y)};
  return "thread " + text(thread_index(t), blockDim) + " of block " + text(b, gridDim);
}
std::string here() { return thread_name(current_block, current_thread); }

static void enter() {
  body(body_argument);
  end_thread();
  fibers[current_thread].state = DONE;
  _longjmp(scheduler, 1);
}
static void yield() {
  if (_setjmp(fibers[current_thread].position) == 0) _longjmp(scheduler, 1);
}
void leave_kernel() { _longjmp(block_exit, 1); }

// Why no thread can go on: the block waits at a barrier that some threads do not reach, or a warp at a function.
static void explain_deadlock() {
  const Fiber *barrier = nullptr, *warp = nullptr, *done = nullptr;
  for (uint32_t t = 0; t < threads_per_block; ++t) {
    const Fiber& fiber = fibers[t];
    const Fiber*& kind = fiber.state == AT_BARRIER ? barrier : fiber.state == IN_WARP ? warp : done;
    if (!kind) kind = &fiber;
  }
  if (warp) {
    current_thread = uint32_t(warp - fibers);
    const unsigned missing = warp->mask & ~meetings[current_thread / LANES][warp->mask].arrived;
    const uint32_t lane = __builtin_ctz(missing), other = current_thread / LANES * LANES + lane;
    std::string reason = here() + " waits for lane " + std::to_string(lane) + ", which its mask names and which ";
    if (other >= threads_per_block) reason += "the block does not have";
    else reason += fibers[other].state == DONE ? "has ended" : "waits elsewhere";
    fail(reason, warp->pc);
  }
  current_thread = uint32_t(barrier - fibers);
  const std::string ended = thread_name(current_block, uint32_t(done - fibers));
  fail("barrier: " + here() + " waits in __syncthreads, and " + ended + " has ended without it", barrier->pc);
}
static void check_barriers() {  // all threads wait: they must wait at one barrier
  for (uint32_t t = 1; t < threads_per_block; ++t)
    if (fibers[t].pc != fibers[0].pc) {
      current_thread = t;
      fail("barrier: " + here() + " waits in another __syncthreads than " + thread_name(current_block, 0),
           fibers[t].pc, fibers[0].pc);
    }
}
// Let a thread run until it waits or ends. In a function of its own: a jump back may lose changed locals.
static __attribute__((noinline)) void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.is_started) _longjmp(fiber.position, 1);
  fiber.is_started = true, made_progress = true;
  setcontext(&fiber.start);
}
static void run_block() {
  int64_t block_barriers = 0;
  for (;;) {
    uint32_t waiting = 0, done = 0;
    made_progress = false;
    for (uint32_t t = 0; t < threads_per_block; ++t) {
      Fiber& fiber = fibers[t];
      if (fiber.state == READY || fiber.state == IN_WARP) {
        current_thread = t, threadIdx = thread_index(t), unsynchronised_steps = fiber.steps;
        resume(fiber);
        fiber.steps = unsynchronised_steps;
        made_progress |= fiber.state == DONE || fiber.state == AT_BARRIER;
      }
      done += fiber.state == DONE, waiting += fiber.state == AT_BARRIER;
    }
    if (done == threads_per_block) return;
    if (waiting == threads_per_block) {
      check_barriers();
      ++counts.barriers;
      if (++block_barriers > MAX_BARRIERS) {
        current_thread = 0;
        fail("endless loop: " + here() + " does not leave a loop with a barrier in it", fibers[0].pc);
      }
      flush_counts();
      block_sync_time = ++clock_now;
      for (uint32_t t = 0; t < threads_per_block; ++t) fibers[t].state = READY, fibers[t].steps = 0;
      continue;
    }
    if (!made_progress) explain_deadlock();
  }
}
void run_grid(void (*function)(void*), void* argument, const unsigned* grid, const unsigned* block, size_t shared) {
  if (!stacks)
    stacks = (char*)mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  body = function, body_argument = argument;
  gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
  threads_per_block = block[0] * block[1] * block[2];
  const uint32_t blocks = grid[0] * grid[1] * grid[2];
  fence_time.assign(blocks, 0);
  launch_start = ++clock_now;
  ++counts.launches, counts.blocks += blocks, counts.threads += int64_t(blocks) * threads_per_block;
  in_kernel = true;
  for (current_block = 0; current_block < blocks && !has_fault; ++current_block) {
    blockIdx = {current_block % grid[0], current_block / grid[0] % grid[1], current_block / (grid[0] * grid[1])};
    start_block(shared);
    block_sync_time = ++clock_now;
    for (auto& time : warp_sync_time) time = 0;
    for (auto& of_warp : meetings) of_warp.clear();
    for (uint32_t t = 0; t < threads_per_block; ++t) {
      Fiber& fiber = fibers[t];
      fiber.is_started = false, fiber.state = READY, fiber.steps = 0;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = stacks + t * STACK_BYTES;
      fiber.start.uc_stack.ss_size = STACK_BYTES;
      makecontext(&fiber.start, enter, 0);
    }
    if (_setjmp(block_exit) == 0) run_block(), end_block();  // a fault jumps back here
    flush_counts();
  }
  in_kernel = false;
}

// All lanes of the mask meet; returns the values that they brought.
static const uint64_t* meet(unsigned mask, uint64_t value, const void* pc) {
  const uint32_t lane = current_thread % LANES;
  if (!in_kernel) fail("a warp function is called by host code", pc);
  if (!(mask >> lane & 1)) fail(here() + " calls a warp function with a mask that does not name its own lane", pc);
  // Lanes that a short last warp does not have cannot arrive: the mask of all lanes means those that it has.
  const uint32_t first = current_thread - lane, size = std::min<uint32_t>(LANES, threads_per_block - first);
  if (mask == ~0u && size < LANES) mask = (1u << size) - 1;
  Meeting& meeting = meetings[current_thread / LANES][mask];
  const uint64_t generation = meeting.generation;
  meeting.values[generation % 2][lane] = value;
  meeting.arrived |= 1u << lane, made_progress = true;
  if (meeting.arrived == mask) {
    meeting.arrived = 0, ++meeting.generation;
  } else {
    Fiber& fiber = fibers[current_thread];
    fiber.pc = pc, fiber.mask = mask;
    while (meeting.generation == generation) fiber.state = IN_WARP, yield();
    fibers[current_thread].state = READY, made_progress = true;
  }
  return meeting.values[generation % 2];
}
template <typename T> static uint64_t bits(T value) {
  uint64_t b = 0;
  std::memcpy(&b, &value, sizeof value);
  return b;
}
template <typename T> static T shuffle(unsigned mask, T value, int source, int width, const void* pc) {
  // Beyond its segment of ``width`` lanes a lane gets its own value back.
  const int lane = int(current_thread % LANES), segment = lane / width * width;
  if (source < segment || source >= segment + width) source = lane;
  const uint64_t* values = meet(mask, bits(value), pc);
  ++counts.shuffles;
  if (!(mask >> source & 1)) fail(here() + " takes the value of a lane that the mask does not name", pc);
  T result;
  std::memcpy(&result, &values[source], sizeof result);
  return result;
}
template <typename T, typename F> static T update(T* address, const void* pc, F f) {
  access(address, sizeof(T), ATOMIC, pc);
  const T old = *address;
  *address = f(old);
  return old;
}
}  // namespace weft

using namespace weft;
#define CALLER __builtin_return_address(0)
void __syncthreads() {
  if (!in_kernel) fail("__syncthreads is called by host code", CALLER);
  fibers[current_thread].pc = CALLER, fibers[current_thread].state = AT_BARRIER;
  yield();
}
void __syncwarp(unsigned mask) {
  meet(mask, 0, CALLER);
  warp_sync_time[current_thread / LANES] = ++clock_now;
}
void __threadfence() { fence_time[current_block] = ++clock_now; }
void __threadfence_block() {}
unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t* values = meet(mask, predicate != 0, CALLER);
  unsigned result = 0;
  for (int i = 0; i < LANES; ++i) result |= (mask >> i & 1 && values[i]) ? 1u << i : 0;
  return ++counts.shuffles, result;
}
int __any_sync(unsigned mask, int predicate) {
  const uint64_t* values = meet(mask, predicate != 0, CALLER);
  int result = 0;
  for (int i = 0; i < LANES; ++i) result |= (mask >> i & 1) && values[i];
  return ++counts.shuffles, result;
}
int __all_sync(unsigned mask, int predicate) {
  const uint64_t* values = meet(mask, predicate == 0, CALLER);
  int result = 1;
  for (int i = 0; i < LANES; ++i) result &= !((mask >> i & 1) && values[i]);
  return ++counts.shuffles, result;
}
unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  const uint64_t* values = meet(mask, value, CALLER);
  unsigned sum = 0;
  for (int i = 0; i < LANES; ++i) sum += (mask >> i & 1) ? unsigned(values[i]) : 0;
  return ++counts.shuffles, sum;
}
#define LANE int(current_thread % LANES)
#define SHUFFLES(T)                                                                                           \
  T __shfl_sync(unsigned m, T v, int lane, int w) {                                                           \
    return shuffle(m, v, LANE / w * w + (lane % w + w) % w, w, CALLER);                                       \
  }                                                                                                           \
  T __shfl_up_sync(unsigned m, T v, unsigned d, int w) { return shuffle(m, v, LANE - int(d), w, CALLER); }    \
  T __shfl_down_sync(unsigned m, T v, unsigned d, int w) { return shuffle(m, v, LANE + int(d), w, CALLER); }  \
  T __shfl_xor_sync(unsigned m, T v, int x, int w) { return shuffle(m, v, LANE ^ x, w, CALLER); }
SHUFFLES(int)
SHUFFLES(unsigned)
SHUFFLES(float)
SHUFFLES(double)
SHUFFLES(long long)
#define ATOMICS(T)                                                                                     \
  T atomicAdd(T* a, T v) { return update(a, CALLER, [=](T old) { return static_cast<T>(old + v); }); }              \
  T atomicExch(T* a, T v) { return update(a, CALLER, [=](T) { return v; }); }
#define INTEGER_ATOMICS(T)                                                                             \
  ATOMICS(T)                                                                                           \
  T atomicSub(T* a, T v) { return update(a, CALLER, [=](T old) { return static_cast<T>(old - v); }); }              \
  T atomicMax(T* a, T v) { return update(a, CALLER, [=](T old) { return old > v ? old : v; }); }       \
  T atomicMin(T* a, T v) { return update(a, CALLER, [=](T old) { return old < v ? old : v; }); }       \
  T atomicCAS(T* a, T e, T v) { return update(a, CALLER, [=](T old) { return old == e ? v : old; }); }
ATOMICS(float)
ATOMICS(double)
INTEGER_ATOMICS(int)
INTEGER_ATOMICS(unsigned)
INTEGER_ATOMICS(unsigned long long)
