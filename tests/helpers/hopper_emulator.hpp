// Hopper's asynchronous instructions on a CPU (ops/_common/hopper/ptx.cuh), one cluster at a time. Threads are
// fibers that switch in random order, warps at different speeds. Copies of the copy engine complete late and
// in any order; products (wgmma) read shared memory late, each thread its own part. A fault in a protocol
// shows: what a copy will write is NaN from its issue on, accumulators and factors in registers are NaN until
// their product was waited for, and neither a store by the copy engine nor a product takes bytes whose writer has
// no proxy fence behind the write.
#define WEFT_HOPPER_EMULATED
#include "cuda_types.hpp"
#include <map>
#include <random>

#ifndef CLUSTER
#define CLUSTER 1
#endif
#define CLUSTER_DIMENSIONS(blocks)

unsigned char memory[1];  // stands for the beginning of the block's own shared memory
static unsigned char pools[CLUSTER][232448] __attribute__((aligned(1024)));
struct Barrier { unsigned arrived = 0, generation = 0; };
struct Lane { int given; unsigned at, words[4]; };
struct Warp { Barrier barrier; Lane lanes[2][32]; };  // used by turns: one barrier for each use is enough
struct Mbarrier { unsigned count, pending, phase; long bytes; };
struct Product {
  void (*run)(const Product&, float*);
  float* sums;
  unsigned long long a, b;
  bool accumulate;
  unsigned group;
  unsigned factor[4][4];  // A in registers: those of the four lanes that share its rows
};
struct FactorInFlight { unsigned words[4], count, group; };
struct Fiber {
  ucontext_t start;
  jmp_buf at;
  std::vector<char> stack = std::vector<char>(1 << 17);
  bool started, done, fenced;
  unsigned words, proxy_fences, product_group, store_group;
  std::deque<Product> products;
  std::map<float*, std::vector<float>> sums;  // the true accumulators of products in flight
  std::map<unsigned*, FactorInFlight> factors;  // and the true registers of A
  unsigned arrivals[16];  // at named barriers
};
struct Writer { int thread = -1; unsigned proxy_fences = 0; };

static std::vector<Fiber> fibers;
static Warp warps[32 * CLUSTER];
static Barrier all_blocks, everyone[CLUSTER], named[CLUSTER][16];
static std::map<unsigned, Mbarrier> mbarriers[CLUSTER];
static std::vector<Writer> writers[CLUSTER];  // of each 16 bytes of shared memory, by ordinary stores
static unsigned current, count, room, progress;  // count: threads of a block
static std::mt19937 chance;
static jmp_buf home, failed;
static char message[200];
static void (*body)();
static Index threadIdx, blockIdx, gridDim, blockDim;

static void require(bool right, const char* what) {
  if (right) return;
  std::snprintf(message, sizeof message, "thread %u of block %u: %s", current, blockIdx.x, what);
  _longjmp(failed, 1);
}
static unsigned block() { return current / count; }
static unsigned char* pool() { return pools[block()]; }
static void enter() {
  body();
  require(fibers[current].products.empty(), "ends before its products are complete");
  fibers[current].done = true;
  _longjmp(home, 1);
}
static void next() {  // gives the turn away
  if (_setjmp(fibers[current].at) == 0) _longjmp(home, 1);
}
static void arrive(Barrier& barrier, unsigned size) {
  const unsigned mine = barrier.generation;
  ++progress;
  if (++barrier.arrived == size) barrier.arrived = 0, ++barrier.generation;
  else while (barrier.generation == mine) next();
}
inline void __syncthreads() { arrive(everyone[block()], count); }
inline void __syncwarp() { arrive(warps[current / 32].barrier, 32); }
static Lane* together(const Lane& mine) {  // what all lanes of the warp gave
  Lane* lanes = warps[current / 32].lanes[fibers[current].words++ % 2];
  lanes[current % 32] = mine;
  __syncwarp();
  return lanes;
}
inline int __shfl_sync(unsigned, int v, int lane) { return together({.given = v})[lane].given; }
inline float __shfl_xor_sync(unsigned, float v, int step) {
  return std::bit_cast<float>(together({.at = std::bit_cast<unsigned>(v)})[current % 32 ^ step].at);
}
inline unsigned __shfl_xor_sync(unsigned, unsigned v, int step) {
  return together({.at = v})[current % 32 ^ step].at;
}
inline bool __any_sync(unsigned, bool v) {
  const Lane* lanes = together({.given = v});
  return std::any_of(lanes, lanes + 32, [](const Lane& lane) { return lane.given; });
}
inline int atomicAdd(int* at, int v) { return std::exchange(*at, *at + v); }
static unsigned char* shared_at(unsigned at, unsigned size) {
  require(at % std::min(size, 16u) == 0 && at + size <= room, "shared memory out of bounds or not aligned");
  return pool() + at;
}
static bool has_ended(unsigned rank) {
  for (unsigned t = 0; t < count; ++t)
    if (!fibers[rank * count + t].done) return false;
  return true;
}
static unsigned swizzled(unsigned at, unsigned row_bytes = 128) {  // rows of 64 bytes: a swizzle of 64
  return at ^ (at >> 7 & (row_bytes / 16 - 1)) << 4;
}

inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }

namespace hopper {

// As the test's host makes it: two dimensions, the inner one contiguous, or four, whose boxes have one element
// along the last two.
struct alignas(64) TensorMap {
  unsigned char* base;
  long long extent[2], row_bytes, box[2], item_bytes, outer_extent[2], outer_bytes[2], unused[5];
};

struct Copy {
  bool is_load;
  unsigned block, at, mbarrier, thread, group;
  TensorMap map;
  int x, y, z, w;
  unsigned delay;
  unsigned bytes;  // of a copy without a map, which is between `at` and `global`
  void* global;
  bool adds;
  bool inside(long long column, long long row) const {
    return x + column < map.extent[0] && y + row < map.extent[1] && x + column >= 0 && y + row >= 0 &&
           std::min(z, w) >= 0 && z < std::max(map.outer_extent[0], 1ll) && w < std::max(map.outer_extent[1], 1ll);
  }
};
static std::vector<Copy> copies;  // in flight
struct Sent { unsigned block, at, mbarrier; float four[4]; };
static std::vector<Sent> sent;  // stores to other blocks, in flight

static bool by_chance(double share) { return chance() < share * 4294967296.0; }
static void copy(const Copy& c) {
  const TensorMap& m = c.map;
  if (c.bytes && c.is_load) std::memcpy(pools[c.block] + c.at, c.global, c.bytes);
  else if (c.bytes && !c.adds) std::memcpy(c.global, pools[c.block] + c.at, c.bytes);
  else if (c.bytes)
    for (unsigned i = 0; i < c.bytes / 4; ++i)
      static_cast<float*>(c.global)[i] += reinterpret_cast<float*>(pools[c.block] + c.at)[i];
  if (c.bytes) return;
  const unsigned row_bytes = m.box[0] * m.item_bytes;
  for (long long y = 0; y < m.box[1]; ++y)
    for (long long x = 0; x < m.box[0]; ++x) {
      unsigned char* there = pools[c.block] + swizzled(c.at + y * row_bytes + x * m.item_bytes, row_bytes);
      const bool inside = c.inside(x, y);
      unsigned char* here = m.base + (c.y + y) * m.row_bytes + (c.x + x) * m.item_bytes +
                            c.z * m.outer_bytes[0] + c.w * m.outer_bytes[1];
      if (!c.is_load) {
        if (inside) std::memcpy(here, there, m.item_bytes);
      } else if (inside) std::memcpy(there, here, m.item_bytes);
      else std::memset(there, 0, m.item_bytes);
    }
}
// True if the copy engine and products see this write, or if no thread wrote here.
static bool is_visible(const Writer& w) {
  return w.thread < 0 || fibers[w.thread].proxy_fences > w.proxy_fences;
}
static void check(Mbarrier& b) {
  ++progress;
  if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count;
}
static Mbarrier& mbarrier_at(unsigned at, unsigned rank) {
  require(mbarriers[rank].count(at), "an mbarrier that was not initialised");
  return mbarriers[rank][at];
}
static void complete(size_t index) {
  const Copy c = copies[index];
  copies.erase(copies.begin() + index);
  require(!has_ended(c.block), "the block ends before its copies");
  copy(c);
  ++progress;
  if (c.is_load) {
    Mbarrier& b = mbarrier_at(c.mbarrier, c.block);
    b.bytes -= c.bytes ? c.bytes : c.map.box[0] * c.map.box[1] * c.map.item_bytes;
    check(b);
  }
}

static void complete_sent(size_t index) {
  const Sent s = sent[index];
  sent.erase(sent.begin() + index);
  require(!has_ended(s.block), "a block ends before a store to it");
  std::memcpy(pools[s.block] + s.at, s.four, 16);
  ++progress;
  Mbarrier& b = mbarrier_at(s.mbarrier, s.block);
  b.bytes -= 16;
  check(b);
}

inline unsigned shared_address(const void* p) { return (const unsigned char*)p - memory; }
inline void mbarrier_init(unsigned at, unsigned arrivals) {
  shared_at(at, 8);
  mbarriers[block()][at] = {arrivals, arrivals, 0, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_at(unsigned at, unsigned rank) {
  require(rank < CLUSTER && !has_ended(rank), "an arrival at a block that has ended");
  Mbarrier& b = mbarrier_at(at, rank);
  require(b.pending > 0, "one arrival too many");
  --b.pending;
  check(b);
}
inline void mbarrier_arrive(unsigned at) { mbarrier_arrive_at(at, block()); }
inline void mbarrier_arrive_expect(unsigned at, unsigned bytes) {
  mbarrier_at(at, block()).bytes += bytes;
  mbarrier_arrive(at);
}
inline bool mbarrier_try_wait(unsigned at, unsigned parity) {
  Mbarrier& b = mbarrier_at(at, block());
  if (b.phase == parity) next();
  return b.phase != parity;
}
inline void tma_prefetch(const TensorMap*) {}
static void issue(const Copy& c) {
  const unsigned row_bytes = c.map.box[0] * c.map.item_bytes;
  const unsigned bytes = c.bytes ? c.bytes : c.map.box[1] * row_bytes;
  if (c.bytes) require(c.at % 16 == 0 && (size_t)c.global % 16 == 0 && bytes % 16 == 0, "16 bytes are copied");
  else require(c.at % 1024 == 0 && (row_bytes == 128 || (row_bytes == 64 && c.is_load)),
               "a box is rows of 128 bytes in an atom, or of 64 bytes");
  // Elsewhere the instruction is illegal on an H200.
  require(c.bytes || c.x * c.map.item_bytes % 16 == 0, "a box begins at a multiple of 16 bytes of its rows");
  shared_at(c.at, bytes);
  for (unsigned chunk = c.at / 16; chunk < (c.at + bytes) / 16; ++chunk) {
    Writer& w = writers[c.block][chunk];
    if (c.is_load) {
      w = {};
      continue;
    }
    const unsigned at = swizzled(chunk * 16) - c.at;  // as without the swizzle
    const bool is_read = c.bytes || c.inside(at % 128 / c.map.item_bytes, at / 128);
    require(!is_read || (w.thread >= 0 && is_visible(w)),
            "no proxy fence before a store");
  }
  if (c.is_load) std::memset(pools[c.block] + c.at, 0xff, bytes);
  copies.push_back(c);
  if (by_chance(0.1)) copies.back().delay = chance() % 60;
}
inline void tma_load(unsigned to, const TensorMap* map, int x, int y, unsigned mbarrier) {
  issue({true, block(), to, mbarrier, current, 0, *map, x, y});
}
inline void tma_load(unsigned to, const TensorMap* map, int x, int y, int z, int w, unsigned mbarrier) {
  issue({true, block(), to, mbarrier, current, 0, *map, x, y, z, w});
}
inline void tma_load_multicast(unsigned to, const TensorMap* map, int x, int y, unsigned mbarrier,
                               unsigned short blocks) {
  for (unsigned rank = 0; rank < CLUSTER; ++rank)
    if (blocks >> rank & 1) issue({true, rank, to, mbarrier, current, 0, *map, x, y});
}
inline unsigned cluster_rank() { return block(); }
inline void cluster_barrier() { arrive(all_blocks, count * CLUSTER); }
inline void tma_store(const TensorMap* map, unsigned from, int x, int y) {
  issue({false, block(), from, 0, current, fibers[current].store_group, *map, x, y});
}
inline void tma_store(const TensorMap* map, unsigned from, int x, int y, int z, int w) {
  issue({false, block(), from, 0, current, fibers[current].store_group, *map, x, y, z, w});
}
inline void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned mbarrier) {
  issue({.is_load = true, .block = block(), .at = to, .mbarrier = mbarrier, .thread = current, .bytes = bytes,
         .global = const_cast<void*>(from)});
}
inline void bulk_store(void* to, unsigned from, unsigned bytes) {
  issue({.block = block(), .at = from, .thread = current, .group = fibers[current].store_group, .bytes = bytes,
         .global = to});
}
inline void bulk_add(float* to, unsigned from, unsigned bytes) {
  issue({.block = block(), .at = from, .thread = current, .group = fibers[current].store_group, .bytes = bytes,
         .global = to, .adds = true});
}
inline void tma_commit() { ++fibers[current].store_group; }
template <int PENDING> inline void tma_wait_read() {
  for (size_t i = copies.size(); i-- > 0;)
    if (!copies[i].is_load && copies[i].thread == current &&
        (int)(fibers[current].store_group - copies[i].group) > PENDING)
      complete(i);
}
template <int PENDING> inline void tma_wait() { tma_wait_read<PENDING>(); }
inline void fence_async_proxy() { ++fibers[current].proxy_fences; }

// ---- Tensor cores

// A signalling NaN: arithmetic makes another one of it, so that use of accumulators in flight shows.
constexpr unsigned IN_FLIGHT = 0x7fa0dead;

static void run_oldest(Fiber& fiber) {
  const Product p = fiber.products.front();
  fiber.products.pop_front();
  ++progress;
  p.run(p, fiber.sums[p.sums].data());
}
inline void wgmma_fence() { fibers[current].fenced = true; }
inline void wgmma_commit() { ++fibers[current].product_group; }
template <int PENDING> inline void wgmma_wait() {
  Fiber& fiber = fibers[current];
  if (!fiber.products.empty() && current % 32 == 0)
    while (by_chance(0.3)) next();  // products take time: other warps run meanwhile
  while (!fiber.products.empty() && (int)(fiber.product_group - fiber.products.front().group) > PENDING)
    run_oldest(fiber);
  __syncwarp();  // the warp waits as one
  for (auto one = fiber.sums.begin(); one != fiber.sums.end();) {
    bool in_flight = false;
    for (const Product& p : fiber.products) in_flight |= p.sums == one->first;
    if (in_flight) { ++one; continue; }
    for (size_t i = 0; i < one->second.size(); ++i)
      require(std::memcmp(one->first + i, &IN_FLIGHT, 4) == 0, "accumulators were written during a product");
    std::copy(one->second.begin(), one->second.end(), one->first);
    one = fiber.sums.erase(one);
    fiber.fenced = false;
  }
  for (auto one = fiber.factors.begin(); one != fiber.factors.end();) {
    if ((int)(fiber.product_group - one->second.group) <= PENDING) { ++one; continue; }
    for (unsigned i = 0; i < one->second.count; ++i)
      require(one->first[i] == IN_FLIGHT, "a factor in registers was written during a product");
    std::copy_n(one->second.words, one->second.count, one->first);
    one = fiber.factors.erase(one);
    fiber.fenced = false;
  }
}
template <int COUNT> inline void pin_registers(float (&)[COUNT]) {}
template <int ROWS, int COUNT> inline void pin_registers(unsigned (&)[ROWS][COUNT]) {}
inline void pin_register(unsigned&) {}
// The address of an element of a factor in shared memory.
template <bool MN_MAJOR> unsigned operand_at(unsigned long long descriptor, int i, int k) {
  const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const unsigned stride = (descriptor >> 32 & 0x3fff) << 4;
  if (!MN_MAJOR && descriptor >> 62 == 2) return swizzled(start + i / 8 * stride + i % 8 * 64 + k * 2, 64);
  require(descriptor >> 62 == 1, "a descriptor without the swizzle of 128 bytes");
  const unsigned at = MN_MAJOR ? i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                               : i / 8 * stride + i % 8 * 128 + k * 2;
  return swizzled(start + at);
}
template <typename T, bool MN_MAJOR> float operand(unsigned long long descriptor, int i, int k) {
  const unsigned at = operand_at<MN_MAJOR>(descriptor, i, k);
  require(is_visible(writers[block()][at / 16]), "no proxy fence before a product");
  T v;
  std::memcpy(&v, pool() + at, 2);
  return to_float(v);
}
// From its issue on the accumulators of a product are NaN to their thread.
static void begin_product(float* sums, int count) {
  Fiber& fiber = fibers[current];
  if (fiber.sums.count(sums)) return;
  require(fiber.fenced, "no wgmma_fence before the first product");
  fiber.sums[sums].assign(sums, sums + count);
  for (int i = 0; i < count; ++i) std::memcpy(&sums[i], &IN_FLIGHT, 4);
}
template <typename T, int A_MAJOR, int B_MAJOR, int WIDTH> struct Wgmma {
  static void multiply(const Product& p, float* sums) {
    const unsigned thread = current % 128;
    float a[2][16], b[16];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 16; ++k)
        a[half][k] = operand<T, A_MAJOR>(p.a, thread / 32 * 16 + thread % 32 / 4 + half * 8, k);
    for (int i = 0; i < WIDTH / 2; i += i % 2 ? 3 : 1) {  // two columns, each in two rows
      for (int k = 0; k < 16; ++k) b[k] = operand<T, B_MAJOR>(p.b, i / 4 * 8 + thread % 4 * 2 + i % 2, k);
      for (int half = 0; half < 2; ++half) {
        float& sum = sums[i + half * 2];
        if (!p.accumulate) sum = 0;
        for (int k = 0; k < 16; ++k) sum = fmaf(a[half][k], b[k], sum);
      }
    }
  }
  static void run(float (&d)[WIDTH / 2], unsigned long long a, unsigned long long b, int accumulate) {
    Fiber& fiber = fibers[current];
    begin_product(d, WIDTH / 2);
    fiber.products.push_back({multiply, d, a, b, accumulate != 0, fiber.product_group});
  }
};
// ---- Tensor cores, the first factor in registers (wgmma_register_shapes.cuh)

// From the issue on the registers of A are NaN to their thread. Returns those of the lanes that share its rows.
static const Lane* begin_factor(unsigned* a, unsigned size = 4) {
  Fiber& fiber = fibers[current];
  FactorInFlight factor = {{}, size, fiber.product_group};
  if (fiber.factors.count(a)) std::copy_n(fiber.factors[a].words, size, factor.words);
  else {
    require(fiber.fenced, "no wgmma_fence before the first product");
    std::copy_n(a, size, factor.words);
  }
  fiber.factors[a] = factor;
  std::fill_n(a, size, IN_FLIGHT);
  Lane mine = {};
  std::copy_n(factor.words, 4, mine.words);
  return together(mine) + current % 32 / 4 * 4;
}
template <typename T> float element_of(unsigned word, int i) {
  T two[2];
  std::memcpy(two, &word, 4);
  return to_float(two[i]);
}
template <typename T, int B_MAJOR, int WIDTH> struct WgmmaFromRegisters {
  static void multiply(const Product& p, float* sums) {
    float a[2][16], b[16];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 16; ++k)
        a[half][k] = element_of<T>(p.factor[k % 8 / 2][half + k / 8 * 2], k % 2);
    for (int i = 0; i < WIDTH / 2; i += i % 2 ? 3 : 1) {  // two columns, each in two rows
      const int column = i / 4 * 8 + current % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) b[k] = operand<T, B_MAJOR>(p.b, column, k);
      for (int half = 0; half < 2; ++half) {
        float& sum = sums[i + half * 2];
        if (!p.accumulate) sum = 0;
        for (int k = 0; k < 16; ++k) sum = fmaf(a[half][k], b[k], sum);
      }
    }
  }
  static void run(float (&d)[WIDTH / 2], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    Fiber& fiber = fibers[current];
    begin_product(d, WIDTH / 2);
    const Lane* lanes = begin_factor(const_cast<unsigned*>(a));
    Product product = {multiply, d, 0, b, accumulate != 0, fiber.product_group};
    for (int lane = 0; lane < 4; ++lane) std::copy_n(lanes[lane].words, 4, product.factor[lane]);
    fiber.products.push_back(product);
  }
};

// ---- Tensor cores, float32 factors (wgmma_tf32_shapes.cuh): the last 13 bits are ignored
inline float operand_tf32(unsigned long long descriptor, int i, int k) {
  const unsigned start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  require(descriptor >> 62 == 1, "a descriptor without the swizzle of 128 bytes");
  unsigned bits;
  std::memcpy(&bits, pool() + swizzled(start + i / 8 * stride + i % 8 * 128 + k * 4), 4);
  return std::bit_cast<float>(bits & 0xffffe000);
}
template <int WIDTH> struct Wgmma<float, 0, 0, WIDTH> {
  static void multiply(const Product& p, float* sums) {
    const unsigned thread = current % 128;
    float a[2][8], b[8];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 8; ++k)
        a[half][k] = operand_tf32(p.a, thread / 32 * 16 + thread % 32 / 4 + half * 8, k);
    for (int i = 0; i < WIDTH / 2; i += i % 2 ? 3 : 1) {  // two columns, each in two rows
      for (int k = 0; k < 8; ++k) b[k] = operand_tf32(p.b, i / 4 * 8 + thread % 4 * 2 + i % 2, k);
      for (int half = 0; half < 2; ++half) {
        float& sum = sums[i + half * 2];
        if (!p.accumulate) sum = 0;
        for (int k = 0; k < 8; ++k) sum = fmaf(a[half][k], b[k], sum);
      }
    }
  }
  static void run(float (&d)[WIDTH / 2], unsigned long long a, unsigned long long b, int accumulate) {
    begin_product(d, WIDTH / 2);
    fibers[current].products.push_back({multiply, d, a, b, accumulate != 0, fibers[current].product_group});
  }
};
// ---- Tensor cores, 8-bit factors (wgmma_fp8_shapes.cuh)
struct e4m3 { static constexpr int EXPONENT = 4, MANTISSA = 3; };
struct e5m2 { static constexpr int EXPONENT = 5, MANTISSA = 2; };

template <typename F> float value_of(unsigned bits) {
  constexpr int EXPONENT = F::EXPONENT, MANTISSA = F::MANTISSA, TOP = (1 << EXPONENT) - 1;
  const int exponent = bits >> MANTISSA & TOP, mantissa = bits & ((1 << MANTISSA) - 1);
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  if (EXPONENT == 4 && (bits & 0x7f) == 0x7f) return NAN;
  if (EXPONENT == 5 && exponent == TOP) return mantissa ? NAN : sign * INFINITY;
  const int bias = (1 << (EXPONENT - 1)) - 1 + MANTISSA;
  if (exponent == 0) return sign * std::ldexp((float)mantissa, 1 - bias);
  return sign * std::ldexp((float)(mantissa | 1 << MANTISSA), exponent - bias);
}
template <typename F> float operand_fp8(unsigned long long descriptor, int i, int k) {
  static const std::vector<float> values = [] {
    std::vector<float> all(256);
    for (unsigned bits = 0; bits < 256; ++bits) all[bits] = value_of<F>(bits);
    return all;
  }();
  const unsigned start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  require(descriptor >> 62 == 1, "a descriptor without the swizzle of 128 bytes");
  return values[pool()[swizzled(start + i / 8 * stride + i % 8 * 128 + k)]];
}
// A model of the tensor cores' sum: the sum so far and the products are cut, towards zero, to 14 bits of the
// largest of them, and added. (DeepSeek-V3's report, arXiv:2412.19437: "around 14 bits"; not the exact rule.)
inline float add_14_bits(float sum, const float* a, const float* b) {
  float products[32], largest = std::fabs(sum);
  bool finite = std::isfinite(sum);
  for (int k = 0; k < 32; ++k) {
    products[k] = a[k] * b[k];
    finite &= std::isfinite(products[k]);
    largest = std::fmax(largest, std::fabs(products[k]));
  }
  if (!finite) {
    for (float product : products) sum += product;
    return sum;
  }
  if (largest == 0) return 0;
  const float unit = std::ldexp(1.0f, std::ilogb(largest) - 13), units = 1 / unit;
  int count = (int)(sum * units);
  for (float product : products) count += (int)(product * units);
  return count * unit;
}
template <typename A, typename B, int WIDTH> struct WgmmaFp8 {
  static void multiply(const Product& p, float* sums) {
    const unsigned thread = current % 128;
    float a[2][32], b[32];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 32; ++k)
        a[half][k] = operand_fp8<A>(p.a, thread / 32 * 16 + thread % 32 / 4 + half * 8, k);
    for (int i = 0; i < WIDTH / 2; i += i % 2 ? 3 : 1) {  // two columns, each in two rows
      for (int k = 0; k < 32; ++k) b[k] = operand_fp8<B>(p.b, i / 4 * 8 + thread % 4 * 2 + i % 2, k);
      for (int half = 0; half < 2; ++half) {
        float& sum = sums[i + half * 2];
        sum = add_14_bits(p.accumulate ? sum : 0.0f, a[half], b);
      }
    }
  }
  static void run(float (&d)[WIDTH / 2], unsigned long long a, unsigned long long b, int accumulate) {
    begin_product(d, WIDTH / 2);
    fibers[current].products.push_back({multiply, d, a, b, accumulate != 0, fibers[current].product_group});
  }
};
inline void store_matrices(unsigned to, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  const unsigned lane = current % 32;
  shared_at(to, 16);
  const Lane* lanes = together({.at = to, .words = {r0, r1, r2, r3}});
  for (int matrix = 0; matrix < 4; ++matrix)
    std::memcpy(pool() + lanes[matrix * 8 + lane / 4].at + lane % 4 * 4, &lanes[lane].words[matrix], 4);
  writers[block()][to / 16] = {(int)current, fibers[current].proxy_fences};
  __syncwarp();
}
inline void store_word(unsigned to, unsigned word) { std::memcpy(shared_at(to, 4), &word, 4); }
inline void store_zeros(unsigned to) {
  std::memset(shared_at(to, 16), 0, 16);
  writers[block()][to / 16] = {(int)current, fibers[current].proxy_fences};
}
inline int load_acquire(const int* from) {
  next();
  return *from;
}
inline void store_release(int* to, int value) {
  for (const Copy& c : copies) require(c.is_load || c.thread != current, "a release before stores are complete");
  ++progress;
  *to = value;
}
inline void load_four(float (&to)[4], unsigned from) { std::memcpy(to, shared_at(from, 16), 16); }
// The block's number stands above the address.
inline unsigned in_block(unsigned at, unsigned rank) { return at | rank << 24; }
inline void send_four(unsigned to, unsigned mbarrier, float a, float b, float c, float d) {
  const unsigned rank = to >> 24, at = to & 0xffffff;
  require(rank < CLUSTER && mbarrier >> 24 == rank, "a store and its barrier are in one block of the cluster");
  require(!has_ended(rank), "a store to a block that has ended");
  std::memset(pools[rank] + (shared_at(at, 16) - pool()), 0xff, 16);
  writers[rank][at / 16] = {(int)current, fibers[current].proxy_fences};
  sent.push_back({rank, at, mbarrier & 0xffffff, {a, b, c, d}});
}
inline void load_two(float (&to)[2], unsigned from) { std::memcpy(to, shared_at(from, 8), 8); }
inline void store_four(unsigned to, float a, float b, float c, float d) {
  const float four[4] = {a, b, c, d};
  std::memcpy(shared_at(to, 16), four, 16);
  writers[block()][to / 16] = {(int)current, fibers[current].proxy_fences};
}
inline float power_of_2(float x) { return std::exp2f(x); }
inline float binary_logarithm(float x) { return std::log2f(std::fabs(x) < 0x1p-126f ? 0.0f : x); }
inline float reciprocal(float x) { return 1.0f / x; }
template <typename T> unsigned rounded_pair(float low, float high) {
  const T two[2] = {from_float<T>(low), from_float<T>(high)};
  return std::bit_cast<unsigned>(two);
}
inline unsigned load_word(unsigned from) {
  unsigned word;
  std::memcpy(&word, shared_at(from, 4), 4);
  return word;
}
inline void store_words(unsigned to, unsigned first, unsigned second) {
  const unsigned words[2] = {first, second};
  std::memcpy(shared_at(to, 8), words, 8);
  writers[block()][to / 16] = {(int)current, fibers[current].proxy_fences};
}
inline bool elect_one() { return together({})[0].given == 0 && current % 32 == 0; }
template <int COUNT> inline void registers_decrease() { require(COUNT % 8 == 0 && COUNT >= 24, "setmaxnreg"); }
template <int COUNT> inline void registers_increase() { require(COUNT % 8 == 0 && COUNT <= 256, "setmaxnreg"); }
static Barrier& named_barrier_of(int id) {
  require(id > 0 && id < 16, "a named barrier is 1 to 15");
  Barrier& barrier = named[block()][id];
  unsigned& last = fibers[current].arrivals[id];  // the generation after that of this thread's last arrival
  require(last != barrier.generation + 1, "a thread arrives twice in a phase of a named barrier");
  last = barrier.generation + 1;
  return barrier;
}
inline void named_barrier(int id, int threads) { arrive(named_barrier_of(id), threads); }
inline void named_barrier_arrive(int id, int threads) {
  Barrier& barrier = named_barrier_of(id);
  ++progress;
  if (++barrier.arrived == (unsigned)threads) barrier.arrived = 0, ++barrier.generation;
}

static void engine() {  // what runs beside the threads
  for (size_t i = copies.size(); i-- > 0;)
    if (copies[i].delay ? !copies[i].delay-- : by_chance(0.1)) complete(i);
  for (size_t i = sent.size(); i-- > 0;)
    if (by_chance(0.1)) complete_sent(i);
  for (unsigned t = 0; t < count * CLUSTER; ++t)
    while (!fibers[t].products.empty() && by_chance(0.1)) {
      current = t;
      run_oldest(fibers[t]);
    }
}

}  // namespace hopper

static unsigned first_block;  // of the cluster that runs

static void run() {
  std::memset(pools, 0xff, sizeof pools);
  std::vector<unsigned> order(count * CLUSTER / 32), asleep(order.size(), 0);
  for (unsigned w = 0; w < order.size(); ++w) order[w] = w;
  unsigned idle = 0, sweep = 0, left = count * CLUSTER;
  while (left) {
    const unsigned before = progress;
    std::shuffle(order.begin(), order.end(), chance);
    if (CLUSTER > 1 && (sweep++ == 0 || hopper::by_chance(0.01))) {  // a block falls behind the other
      const unsigned late = chance() % CLUSTER;
      for (unsigned w = 0; w < order.size(); ++w)
        if (w * 32 / count == late) asleep[w] = chance() % 100;
    }
    for (unsigned w : order) {
      if (asleep[w]) { --asleep[w]; continue; }
      if (hopper::by_chance(0.02)) asleep[w] = chance() % 40;  // a warp falls behind
      for (unsigned t = w * 32; t < w * 32 + 32; ++t) {
        if (fibers[t].done) continue;
        current = t, threadIdx = {t % count, 0, 0}, blockIdx.x = first_block + t / count;
        if (_setjmp(home)) { left -= fibers[current].done; continue; }
        if (fibers[t].started) _longjmp(fibers[t].at, 1);
        fibers[t].started = true;
        setcontext(&fibers[t].start);
      }
    }
    hopper::engine();
    idle = progress == before ? idle + 1 : 0;
    require(idle < 5000, "deadlock: all threads wait");
  }
  require(hopper::copies.empty() && hopper::sent.empty(), "the block ends before its copies");
}

const long long* given;
template <typename A> A argument(long long bits) { return *reinterpret_cast<const A*>(bits); }
template <typename A> void call(void (*kernel)(A)) { kernel(argument<std::remove_const_t<A>>(given[0])); }
// Runs the kernel; returns nullptr, or what it did wrong.
extern "C" const char* launch(const unsigned* grid, unsigned threads, unsigned bytes, const long long* a) {
  static unsigned seed = 0;
  const char* text = std::getenv("WEFT_EMULATOR_SEED");
  chance.seed(++seed + (text ? std::atoi(text) : 0) * 1000u);
  gridDim = {grid[0], grid[1], grid[2]}, blockDim = {threads, 1, 1}, given = a, count = threads, room = bytes;
  hopper::copies.clear(), hopper::sent.clear();
  if (_setjmp(failed)) return message;
  for (first_block = 0; first_block < grid[0]; first_block += CLUSTER) {
    blockIdx = {first_block, 0, 0};
    fibers.resize(threads * CLUSTER);
    for (Fiber& one : fibers) {
      one.started = one.done = one.fenced = false, one.words = one.proxy_fences = 0;
      one.product_group = one.store_group = 0, one.products.clear(), one.sums.clear();
      one.factors.clear(), std::fill_n(one.arrivals, 16, 0);
      getcontext(&one.start);
      one.start.uc_stack.ss_sp = one.stack.data();
      one.start.uc_stack.ss_size = one.stack.size();
      makecontext(&one.start, enter, 0);
    }
    all_blocks = {};
    for (unsigned rank = 0; rank < CLUSTER; ++rank) {
      everyone[rank] = {}, mbarriers[rank].clear(), writers[rank].assign(sizeof pools[0] / 16, {});
      for (Barrier& one : named[rank]) one = {};
    }
    for (Warp& warp : warps) warp.barrier = {};
    run();
  }
  return nullptr;
}
