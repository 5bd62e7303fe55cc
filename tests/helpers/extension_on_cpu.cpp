// An extension's kernels on a CPU, under gcc's sanitizers: is every place of the output written, and
// right, and nothing beside it touched? As much of CUDA as the file needs is put in its place: a
// block's threads are threads where the kernel has a barrier, and come one after another where not.
//
// variants.inc, which the test writes, holds the kernels' source once as it is and once for each
// planted fault, in a namespace each, and `VARIANTS`, a table of them. Usage: on_cpu VARIANT.
#include <barrier>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration, cudaErrorInvalidValue };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = int;

namespace on_cpu {
constexpr int WITHOUT_ASKING = 49152, MOST_SHARED = 166912;  // of sm_80, bytes a block
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
thread_local dim3 thread(0), block(0);
dim3 threads(0), blocks(0);
float* shared = nullptr;
int allowed = WITHOUT_ASKING;
cudaError_t last = cudaSuccess;
std::barrier<>* gate = nullptr;

dim3 place(unsigned i, dim3 in) { return {i % in.x, i / in.x % in.y, i / in.x / in.y}; }
unsigned count(dim3 in) { return in.x * in.y * in.z; }

template <typename... Wanted, typename... Given>
void launch(dim3 grid, dim3 size, int bytes, void (*kernel)(Wanted...), Given... given) {
  if (count(grid) == 0 || grid.y > 65535 || count(size) > 1024 || bytes > allowed) {
    last = cudaErrorInvalidConfiguration;
    return;
  }
  blocks = grid, threads = size;
  const std::unique_ptr<float[]> room(new float[bytes / sizeof(float)]);
  shared = room.get();
  if (bytes == 0) {
    for (unsigned b = 0; b < count(grid); ++b)
      for (unsigned t = 0; t < count(size); ++t) {
        block = place(b, grid), thread = place(t, size);
        kernel(given...);
      }
    return;
  }
  auto fill = [=] { std::fill(shared, shared + bytes / sizeof(float), NOT_A_NUMBER); };
  fill();
  std::barrier<> all(count(size)), done(count(size));
  gate = &all;
  auto work = [&](unsigned t) {
    for (unsigned b = 0; b < count(grid); ++b) {
      block = place(b, grid), thread = place(t, size);
      kernel(given...);
      done.arrive_and_wait();
      if (t == 0) fill();  // nothing is left of the block before
      done.arrive_and_wait();
    }
  };
  std::vector<std::thread> running;
  for (unsigned t = 0; t < count(size); ++t) running.emplace_back(work, t);
  for (auto& one : running) one.join();
}
}  // namespace on_cpu

#define threadIdx on_cpu::thread
#define blockIdx on_cpu::block
#define blockDim on_cpu::threads
#define gridDim on_cpu::blocks
void __syncthreads() { on_cpu::gate->arrive_and_wait(); }
cudaError_t cudaGetLastError() { return std::exchange(on_cpu::last, cudaSuccess); }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  if (bytes > on_cpu::MOST_SHARED) return cudaErrorInvalidValue;
  on_cpu::allowed = bytes;
  return cudaSuccess;
}

struct Variant {
  const char* name;
  cudaError_t (*relu)(const float*, float*, int64_t, cudaStream_t);
  cudaError_t (*add)(const float*, int64_t, int64_t, const float*, int64_t, int64_t, float*, int64_t,
                     int64_t, cudaStream_t);
  cudaError_t (*matmul)(const float*, const float*, float*, int64_t, int64_t, int64_t,
                        cudaStream_t);
};

#include "variants.inc"

// Memory with not one float to spare, which the address sanitizer fences: n floats, the first of
// them `offset` floats after a place aligned to 16 bytes.
struct Floats {
  int64_t n;
  std::unique_ptr<float[]> room;
  float* data;
  explicit Floats(int64_t n, int64_t offset = 0)
      : n(n), room(new float[n + offset]), data(room.get() + offset) {
    std::fill(data, data + n, on_cpu::NOT_A_NUMBER);
  }
  Floats& normal(std::mt19937& chance) {
    std::normal_distribution<float> draw;
    for (int64_t i = 0; i < n; ++i) data[i] = draw(chance);
    return *this;
  }
  float operator[](int64_t i) const { return data[i]; }
};

int cases = 0;
bool tell(bool good, const char* what, int64_t a, int64_t b, int64_t c, cudaError_t said) {
  ++cases;
  if (!good || said != cudaSuccess)
    std::printf("wrong: %s %lld %lld %lld, launch %d\n", what, (long long)a, (long long)b,
                (long long)c, said);
  return good && said == cudaSuccess;
}

bool relu(const Variant& one, std::mt19937& chance) {
  for (int64_t n : {0, 1, 3, 4, 17, 1000, 1023, 100003})
    for (int64_t offset : {0, 1, 2, 3}) {
      Floats x = Floats(n, offset), y(n);
      x.normal(chance);
      if (n > 2) x.data[n - 1] = on_cpu::NOT_A_NUMBER, x.data[0] = -INFINITY;
      const cudaError_t said = one.relu(x.data, y.data, n, 0);
      bool good = true;
      for (int64_t i = 0; i < n; ++i)
        good &= std::isnan(x[i]) ? std::isnan(y[i]) : y[i] == (x[i] > 0 ? x[i] : 0);
      if (!tell(good, "relu", n, offset, 0, said)) return false;
    }
  return true;
}

bool add(const Variant& one, std::mt19937& chance) {
  const int64_t shapes[][2] = {{1, 17}, {17, 17}, {17, 1000}, {1000, 17},
                               {0, 5},  {5, 0},   {1, 1}};
  for (const auto& [rows, columns] : shapes)
    for (bool turned : {false, true}) {
      Floats a(rows * columns), b(rows), out(rows * columns);
      a.normal(chance), b.normal(chance);
      const int64_t down = turned ? 1 : columns, across = turned ? rows : 1;
      const cudaError_t said =
          one.add(a.data, down, across, b.data, 1, 0, out.data, rows, columns, 0);  // b: a column
      bool good = true;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c)
          good &= out[r * columns + c] == a[r * down + c * across] + b[r];
      if (!tell(good, "add", rows, columns, turned, said)) return false;
    }
  return true;
}

bool matmul(const Variant& one, std::mt19937& chance) {
  const int64_t sizes[][3] = {{1, 1, 1}, {17, 17, 17}, {64, 128, 64}, {65, 129, 63},
                              {3, 0, 5}, {0, 4, 4},    {70, 300, 130}};
  for (const auto& [rows, inner, columns] : sizes) {
    Floats a(rows * inner), b(inner * columns), c(rows * columns);
    a.normal(chance), b.normal(chance);
    on_cpu::allowed = on_cpu::WITHOUT_ASKING;
    const cudaError_t said = one.matmul(a.data, b.data, c.data, rows, columns, inner, 0);
    bool good = true;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t n = 0; n < columns; ++n) {
        double exact = 0, size = 0;
        for (int64_t k = 0; k < inner; ++k) {
          const double term = double(a[r * inner + k]) * b[k * columns + n];
          exact += term, size += std::abs(term);
        }
        good &= std::abs(c[r * columns + n] - exact) <= size * double(inner) * 0x1p-24;
      }
    if (!tell(good, "matmul", rows, inner, columns, said)) return false;
  }
  return true;
}

int main(int count, char** words) {
  for (const Variant& one : VARIANTS)
    if (count == 2 && std::string(words[1]) == one.name) {
      std::mt19937 chance(17);
      const bool good = relu(one, chance) && add(one, chance) && matmul(one, chance);
      if (good) std::printf("right: %d cases\n", cases);
      return good ? 0 : 1;
    }
  std::printf("no such variant\n");
  return 2;
}
