// CUDA's words for one block at a time on a CPU: a thread is a thread, a barrier a barrier, and
// shared memory a static. Enough for kernels whose warps do not shuffle.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>
#define __global__
#define __device__
#define __shared__ static
struct Index { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static thread_local Index threadIdx;
static Index blockIdx, blockDim, gridDim;
static std::barrier<>* everyone;
static inline void __syncthreads() { everyone->arrive_and_wait(); }
static inline void __syncwarp() { everyone->arrive_and_wait(); }
using std::fmaf;
using std::min;
template <typename Kernel>
static void launch(const unsigned* grid, const unsigned* block, Kernel kernel) {
  gridDim = {grid[0], grid[1], 1}, blockDim = {block[0], block[1], 1};
  for (unsigned y = 0; y < grid[1]; ++y)
    for (unsigned x = 0; x < grid[0]; ++x) {
      blockIdx = {x, y, 0};
      std::barrier<> all(block[0] * block[1]);
      everyone = &all;
      std::vector<std::thread> threads;
      for (unsigned t = 0; t < block[0] * block[1]; ++t)
        threads.emplace_back([&, t] { threadIdx = {t % block[0], t / block[0], 0}; kernel(); });
      for (auto& thread : threads) thread.join();
    }
}
