// Step 8: no two threads of a request read or write different words of one bank.
//
// In step 7 neighbouring threads read float4 that are 32 bytes apart: 8 of them span 256 bytes, two words
// a bank. Here a thread has four squares of 4 x 4, 64 apart, and neighbours read adjacent float4. Four
// floats of padding after each k of a put the 16 rows by 2 k that a warp's copies write into 32 banks.
#include "copied_tiles.cuh"

// a: (m, k), b: (k, n), c: (m, n), contiguous, 16-byte aligned; k and n are multiples of 4. One block for
// each 128 x 128 of c, tiles row by row. Dynamic shared memory: 2 buffers of 8 x 260 floats.
extern "C" __global__ void __launch_bounds__(THREADS)
matmul_conflict_free(const float* a, const float* b, float* c, index_t m, index_t n, index_t k) {
  extern __shared__ __align__(128) unsigned char pool[];
  const index_t column_tiles = (n + SIDE - 1) / SIDE;
  const index_t top = blockIdx.x / column_tiles * SIDE, left = blockIdx.x % column_tiles * SIDE;
  const int x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;
  CopiedTiles<SIDE + 4> tiles(a, b, reinterpret_cast<float*>(pool), top, left, m, n, k);
  Squares<64, 64> squares;
  multiply(tiles, squares, y, x);
  squares.store(c, top + y, left + x, m, n);
}
