// CUDA emulation on a CPU for kernels whose blocks wait for each other: several blocks run at once, each at
// its own random speed, and blocks start in random order, as the hardware is free to do. Threads are
// fibers.
//
// A block's shared memory is NaN at its start. A load of a word that blocks share lets others run first.
// Blocks that wait for one that cannot start are an error and not an endless loop.
#define WEFT_PUBLISHED_WORD
#define WEFT_NAMED_BARRIER
#define WEFT_ASYNC_COPY
#define WEFT_SORT_PTX
#include "cuda_types.hpp"
#include <map>
#include <random>
typedef unsigned long long Word;

constexpr unsigned RESIDENT = 3, WARPS_AT_MOST = 32, PATIENCE = 20000;
struct Barrier { unsigned arrived = 0, generation = 0; };
struct Warp { Barrier barrier; unsigned values[2][32]; };  // used by turns: one barrier an exchange is enough
struct Copy { void* to; const void* from; size_t valid, size; };
struct Fiber {
  ucontext_t start;
  jmp_buf at;
  char* stack = nullptr;
  bool started, done;
  unsigned exchanges;
  std::vector<Copy> copies;
  std::vector<std::vector<Copy>> groups;  // of copies that were committed
};
struct Block {
  Index index;
  unsigned left = 0, slowness;
  std::vector<Fiber> fibers;
  Warp warps[WARPS_AT_MOST];
  Barrier everyone, named[16];
  std::map<int, std::vector<unsigned char>> shared;
};
static Block blocks[RESIDENT];
static unsigned shared_bytes;
static Block* own;  // block of the fiber that runs
static unsigned current, count;
static unsigned long long progress;
static jmp_buf home;
static void (*body)();
static Index threadIdx, blockIdx, blockDim, gridDim;
static std::minstd_rand random_number(1);

static void enter() {
  body();
  own->fibers[current].done = true, --own->left, ++progress;
  _longjmp(home, 1);
}
static void yield() {
  if (_setjmp(own->fibers[current].at) == 0) _longjmp(home, 1);
}
// A warp that votes in a loop until another block has published a word does not count as progress.
static void arrive(Barrier& barrier, unsigned size, bool is_progress = true) {
  const unsigned mine = barrier.generation;
  if (++barrier.arrived == size) barrier.arrived = 0, ++barrier.generation, progress += is_progress;
  else while (barrier.generation == mine) yield();
}
inline void __syncthreads() { arrive(own->everyone, count); }
inline void named_barrier(int id, int threads) { arrive(own->named[id], threads); }
static void* declared(int id, size_t bytes) {
  auto& memory = own->shared[id];
  if (memory.empty()) memory.assign(bytes, 0xff);
  return memory.data();
}
// The block's dynamic shared memory; addresses in it count from its start.
template <typename T> T* dynamic_shared() { return (T*)declared(-1, shared_bytes + 1); }
inline unsigned shared_address(const void* p) { return (const char*)p - dynamic_shared<char>(); }
// An asynchronous copy arrives as late as it may: when its thread waits for it.
template <int COPIED = 16> void copy_async(unsigned to, const void* from, int valid) {
  own->fibers[current].copies.push_back({dynamic_shared<char>() + to, from, (size_t)valid, COPIED});
}
inline void copies_commit() {
  Fiber& fiber = own->fibers[current];
  fiber.groups.push_back(std::exchange(fiber.copies, {}));
}
template <int PENDING> void copies_wait() {
  auto& groups = own->fibers[current].groups;
  for (; groups.size() > PENDING; groups.erase(groups.begin()))
    for (const Copy& copy : groups.front())
      std::memset(copy.to, 0, copy.size), std::memcpy(copy.to, copy.from, copy.valid);
}
inline void store_word(Word* to, Word word) { *to = word, ++progress; }
inline Word load_word(const Word* from) {
  yield();
  return *from;
}
inline void store_word(unsigned* to, unsigned word) { *to = word, ++progress; }
inline unsigned load_word(const unsigned* from) {
  yield();
  return *from;
}
inline Word atomicAdd(Word* to, Word v) {
  yield();
  return std::exchange(*to, *to + v);
}
inline int atomicAdd(int* to, int v) { return std::exchange(*to, *to + v); }
inline unsigned atomicOr(unsigned* to, unsigned v) { return std::exchange(*to, *to | v); }
inline unsigned atomicAdd(unsigned* to, unsigned v) { return std::exchange(*to, *to + v); }

// Exchanges 32 bits between all lanes of the warp.
template <typename T> const unsigned* together(T v) {
  Warp& warp = own->warps[current / 32];
  unsigned* values = warp.values[own->fibers[current].exchanges++ % 2];
  values[current % 32] = std::bit_cast<unsigned>(v);
  arrive(warp.barrier, 32, false);
  return values;
}
template <typename T> T __shfl_sync(unsigned, T v, int from, int width = 32) {
  const unsigned lane = current % 32;
  return std::bit_cast<T>(together(v)[lane / width * width + from % width]);
}
template <typename T> T __shfl_xor_sync(unsigned, T v, int step) {
  return std::bit_cast<T>(together(v)[current % 32 ^ step]);
}
template <typename T> T __shfl_up_sync(unsigned, T v, int step, int width = 32) {
  const int lane = current % 32, from = lane % width < step ? lane : lane - step;
  if constexpr (sizeof(T) == 8) {  // half after half
    const unsigned low = together((unsigned)(Word)v)[from];
    return (T)((Word)together((unsigned)((Word)v >> 32))[from] << 32 | low);
  } else {
    return std::bit_cast<T>(together(v)[from]);
  }
}
inline unsigned __ballot_sync(unsigned, bool v) {
  const unsigned* values = together((unsigned)v);
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= values[i] << i;
  return mask;
}
inline void vote(unsigned digit, unsigned bit, unsigned& votes, unsigned& inverted) {
  votes = __ballot_sync(~0u, (digit & bit) != 0);
  inverted = digit & bit ? 0u : ~0u;
}
template <typename T> T* opaque(T* pointer) { return pointer; }
inline unsigned __match_any_sync(unsigned, int v) {
  const unsigned* values = together(v);
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= (values[i] == (unsigned)v) << i;
  return mask;
}
inline unsigned __brev(unsigned v) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (v >> i & 1) << (31 - i);
  return reversed;
}
inline int __clz(int v) { return std::countl_zero((unsigned)v); }
inline void __syncwarp() { arrive(own->warps[current / 32].barrier, 32, false); }
struct alignas(8) uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
template <typename T> void __stcs(T* to, T v) { *to = v; }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }

static void start(Block& block, unsigned number) {
  block.index = {number, 0, 0}, block.left = count, block.everyone = {}, block.shared.clear();
  for (Barrier& barrier : block.named) barrier = {};
  block.slowness = 1u << random_number() % 4;
  block.fibers.resize(count);
  for (Warp& warp : block.warps) warp.barrier = {};
  constexpr size_t STACK = 1 << 16;
  for (Fiber& fiber : block.fibers) {
    fiber.started = fiber.done = false, fiber.exchanges = 0, fiber.copies.clear(), fiber.groups.clear();
    if (!fiber.stack) fiber.stack = (char*)std::malloc(STACK);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack;
    fiber.start.uc_stack.ss_size = STACK;
    makecontext(&fiber.start, enter, 0);
  }
}
// Lets each thread of a block run until it waits.
static void run(Block& block) {
  static volatile unsigned k;
  const unsigned turn = random_number() % count;
  static unsigned first;
  first = turn;
  for (k = 0; k < count; ++k) {
    current = (first + k) % count;
    Fiber& fiber = block.fibers[current];
    if (fiber.done) continue;
    own = &block, threadIdx = {current, 0, 0}, blockIdx = block.index;
    if (_setjmp(home)) continue;
    if (own->fibers[current].started) _longjmp(own->fibers[current].at, 1);
    own->fibers[current].started = true;
    setcontext(&own->fibers[current].start);
  }
}

template <typename A> A argument(long long bits) {
  if constexpr (sizeof(A) == sizeof bits) return std::bit_cast<A>(bits);
  else return (A)bits;
}
static const long long* parameters;
template <typename... A, size_t... I> static void bound(void (*kernel)(A...), std::index_sequence<I...>) {
  kernel(argument<A>(parameters[I])...);
}
template <typename... A> void call(void (*kernel)(A...)) { bound(kernel, std::index_sequence_for<A...>()); }

extern "C" const char* launch(const unsigned* grid, unsigned threads, unsigned shared, const long long* a) {
  shared_bytes = shared;
  gridDim = {grid[0], grid[1], grid[2]}, blockDim = {threads, 1, 1}, parameters = a, count = threads;
  std::vector<unsigned> waiting(grid[0]);
  for (unsigned i = 0; i < grid[0]; ++i) waiting[i] = i;
  std::shuffle(waiting.begin(), waiting.end(), random_number);
  for (Block& block : blocks) block.left = 0;
  unsigned long long before = progress;
  for (unsigned idle = 0; idle < PATIENCE; ++idle) {
    bool any = false;
    for (Block& block : blocks) {
      if (!block.left && !waiting.empty()) start(block, waiting.back()), waiting.pop_back();
      any |= block.left > 0;
      if (block.left && random_number() % block.slowness == 0) run(block);
    }
    if (!any) return nullptr;
    if (progress != before) idle = 0, before = progress;
  }
  return "the running blocks wait for blocks that cannot start, or for a word that none publishes";
}
