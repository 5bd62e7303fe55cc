// CUDA emulation on a CPU, one block at a time: a CUDA thread is a std::thread, a barrier is a
// std::barrier over the block, and shared memory is a static variable. Kernels with warp shuffles are
// not supported.
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
static std::barrier<>* block_barrier;
static inline void __syncthreads() { block_barrier->arrive_and_wait(); }
static inline void __syncwarp() { block_barrier->arrive_and_wait(); }
using std::fmaf;
using std::min;
template <typename Kernel>
static void launch(const unsigned* grid, const unsigned* block, Kernel kernel) {
  gridDim = {grid[0], grid[1], 1}, blockDim = {block[0], block[1], 1};
  for (unsigned y = 0; y < grid[1]; ++y)
    for (unsigned x = 0; x < grid[0]; ++x) {
      blockIdx = {x, y, 0};
      std::barrier<> all(block[0] * block[1]);
      block_barrier = &all;
      std::vector<std::thread> threads;
      for (unsigned t = 0; t < block[0] * block[1]; ++t)
        threads.emplace_back([&, t] { threadIdx = {t % block[0], t / block[0], 0}; kernel(); });
      for (auto& thread : threads) thread.join();
    }
}
