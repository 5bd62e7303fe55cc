// CUDA's words for one block at a time on a CPU, warps and tensor cores included: a thread is a
// fiber, which goes on until it must wait for others. What the hardware forbids shows: an
// asynchronous copy's target is NaN from when it is asked for until its own thread has waited for
// it, shared memory is NaN at a block's start, and addresses are held to their alignment.
#define WEFT_ATTENTION_PTX  // which are these here
#define WEFT_ASYNC_COPY
#include "cuda_types.hpp"
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Copy { unsigned to; const void* from; int valid, size; };
struct Barrier { unsigned arrived = 0, generation = 0; };
struct Lane { unsigned at, a[4], b[2]; float given; };
struct Warp { Barrier barrier; Lane lanes[2][32]; };  // used by turns: one barrier a word is enough
struct Fiber {
  ucontext_t start;
  jmp_buf at;
  std::vector<char> stack = std::vector<char>(1 << 17);
  bool started, done;
  unsigned words;
  std::deque<std::vector<Copy>> groups;
};
unsigned char pool[232448] __attribute__((aligned(1024)));
static std::vector<Fiber> fibers;
static Warp warps[32];
static Barrier everyone;
static unsigned current, count, room;
static jmp_buf home;
static void (*body)();
static Index threadIdx, blockIdx, gridDim;

static void require(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "thread %u of block %u: %s\n", current, blockIdx.x, what);
  std::abort();
}
static void enter() {
  body();
  fibers[current].done = true;
  _longjmp(home, 1);
}
static void next() {  // gives the turn away
  if (_setjmp(fibers[current].at) == 0) _longjmp(home, 1);
}
static void arrive(Barrier& barrier, unsigned size) {
  const unsigned mine = barrier.generation;
  if (++barrier.arrived == size) barrier.arrived = 0, ++barrier.generation;
  else while (barrier.generation == mine) next();
}
inline void __syncthreads() { arrive(everyone, count); }
inline void __syncwarp() { arrive(warps[current / 32].barrier, 32); }
static Lane* together(const Lane& mine) {  // what all lanes of the warp gave
  Lane* lanes = warps[current / 32].lanes[fibers[current].words++ % 2];
  lanes[current % 32] = mine;
  __syncwarp();
  return lanes;
}
static void run() {
  std::memset(pool, 0xff, sizeof pool);
  for (unsigned left = count; left;) {
    left = 0;
    for (unsigned t = 0; t < count; ++t) {
      if (fibers[t].done) continue;
      current = t, threadIdx = {t, 0, 0}, ++left;
      if (_setjmp(home)) continue;
      if (fibers[t].started) _longjmp(fibers[t].at, 1);
      fibers[t].started = true;
      setcontext(&fibers[t].start);
    }
  }
}

inline float __shfl_xor_sync(unsigned, float v, int step) {
  return together({.given = v})[current % 32 ^ step].given;
}
inline int opaque(int x) { return x; }
inline int opaque_thread() { return threadIdx.x; }
inline unsigned shared_address(const void* p) { return (const unsigned char*)p - pool; }
inline unsigned char* shared_at(unsigned at, unsigned size) {
  require(at % size == 0 && at + size <= room, "shared memory out of bounds or not aligned");
  return pool + at;
}
template <int SIZE = 16> inline void copy_async(unsigned to, const void* from, int valid) {
  require((size_t)from % SIZE == 0, "a copy from what is not aligned");
  std::memset(shared_at(to, SIZE), 0xff, SIZE);
  fibers[current].groups.back().push_back({to, from, valid, SIZE});
}
inline void copies_commit() { fibers[current].groups.emplace_back(); }
template <int PENDING> inline void copies_wait() {
  auto& groups = fibers[current].groups;
  for (; groups.size() > PENDING + 1; groups.pop_front())
    for (const Copy& c : groups.front()) {
      std::memset(pool + c.to, 0, c.size);
      std::memcpy(pool + c.to, c.from, c.valid);
    }
}
template <bool TRANSPOSE> inline void ldmatrix_x4(unsigned (&r)[4], unsigned at) {
  shared_at(at, 16);
  const unsigned lane = current % 32, row = TRANSPOSE ? lane % 4 * 2 : lane / 4;
  const Lane* lanes = together({.at = at});
  for (int m = 0; m < 4; ++m)
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned down = TRANSPOSE ? row + half : row, right = TRANSPOSE ? lane / 4 : lane % 4 * 2 + half;
      std::memcpy((char*)&r[m] + half * 2, pool + lanes[m * 8 + down].at + right * 2, 2);
    }
}
template <typename T> float half_of(const unsigned* words, int k) {
  T v;
  std::memcpy(&v, (const char*)words + k * 2, 2);
  return to_float(v);
}
template <typename T>
inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned lane = current % 32;
  const Lane* lanes = together({.a = {a[0], a[1], a[2], a[3]}, .b = {b0, b1}});
  for (int i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4;
    for (int k = 0; k < 16; ++k)
      c[i] = fmaf(half_of<T>(lanes[row + k % 8 / 2].a + k / 8 * 2 + i / 2, k % 2),
                  half_of<T>(lanes[column + k % 8 / 2].b + k / 8, k % 2), c[i]);
  }
}
template <typename T> inline unsigned pair(float low, float high) {
  const T two[2] = {from_float<T>(low), from_float<T>(high)};
  return std::bit_cast<unsigned>(two);
}
inline float power_of_2(float x) { return std::exp2f(x); }
template <typename V> inline void shared_store(unsigned at, V v) {
  std::memcpy(shared_at(at, sizeof v), &v, sizeof v);
}
inline float shared_load(unsigned at) { return std::bit_cast<float>(*(int*)shared_at(at, 4)); }
template <typename V, int N> inline void shared_load(V (&v)[N], unsigned at) {
  std::memcpy(v, shared_at(at, sizeof v), sizeof v);
}

template <typename A> A argument(long long bits) {
  if constexpr (sizeof(A) == sizeof bits) return std::bit_cast<A>(bits);
  else return *reinterpret_cast<const A*>(bits);  // a structure, by its address
}
template <typename... A, size_t... I>
static void bound(void (*kernel)(A...), std::index_sequence<I...>) {
  extern const long long* given;
  kernel(argument<A>(given[I])...);
}
const long long* given;
template <typename... A> void call(void (*kernel)(A...)) {
  bound(kernel, std::index_sequence_for<A...>());
}
extern "C" const char* launch(const unsigned* grid, unsigned threads, unsigned bytes, const long long* a) {
  gridDim = {grid[0], grid[1], grid[2]}, given = a, count = threads, room = bytes;
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) {
        blockIdx = {x, y, z};
        fibers.resize(threads);
        for (Fiber& one : fibers) {
          one.started = one.done = false, one.words = 0, one.groups.assign(1, {});
          getcontext(&one.start);
          one.start.uc_stack.ss_sp = one.stack.data();
          one.start.uc_stack.ss_size = one.stack.size();
          makecontext(&one.start, enter, 0);
        }
        everyone = {};
        for (Warp& warp : warps) warp.barrier = {};
        run();
      }
  return nullptr;
}
