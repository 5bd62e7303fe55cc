// Step 7: two buffers. Asynchronous copies fill one while the other is multiplied.
//
// In step 6 a thread waits for its loads before it can store them, and for all others before it can
// multiply. Copies from global to shared memory need no registers and nobody waits for them until the next
// tile: one barrier a tile instead of two, and the latency of memory is hidden behind 512 fma of each
// thread.
#include "copied_tiles.cuh"

// a: (m, k), b: (k, n), c: (m, n), contiguous, 16-byte aligned; k and n are multiples of 4. One block for
// each 128 x 128 of c, tiles row by row. Dynamic shared memory: 2 buffers of 8 x 256 floats.
extern "C" __global__ void __launch_bounds__(THREADS)
matmul_double_buffer(const float* a, const float* b, float* c, index_t m, index_t n, index_t k) {
  extern __shared__ __align__(128) unsigned char pool[];
  const index_t column_tiles = (n + SIDE - 1) / SIDE;
  const index_t top = blockIdx.x / column_tiles * SIDE, left = blockIdx.x % column_tiles * SIDE;
  const int x = threadIdx.x % 16 * 8, y = threadIdx.x / 16 * 8;
  CopiedTiles<SIDE> tiles(a, b, reinterpret_cast<float*>(pool), top, left, m, n, k);
  Squares<4, 4> squares;
  multiply(tiles, squares, y, x);
  squares.store(c, top + y, left + x, m, n);
}
