// Step 9: a warp computes 64 x 32 of c, 8 threads down and 4 across.
//
// In step 8 a warp computes 2 x 4 rows by 128 columns in two places: it reads 16 factors of a and 128 of b
// for each k. A tile of 64 x 32 needs 64 + 32, for the same 2048 fma: two thirds of the shared memory's
// traffic.
#include "copied_tiles.cuh"

// a: (m, k), b: (k, n), c: (m, n), contiguous, 16-byte aligned; k and n are multiples of 4. One block for
// each 128 x 128 of c, tiles row by row. Dynamic shared memory: 2 buffers of 8 x 260 floats.
extern "C" __global__ void __launch_bounds__(THREADS)
matmul_warp_tile(const float* a, const float* b, float* c, index_t m, index_t n, index_t k) {
  extern __shared__ __align__(128) unsigned char pool[];
  const index_t column_tiles = (n + SIDE - 1) / SIDE;
  const index_t top = blockIdx.x / column_tiles * SIDE, left = blockIdx.x % column_tiles * SIDE;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Lanes two apart share b's factors, neighbours share a's: a float4 load of a warp takes the least passes.
  const int y = warp / 4 * 64 + (lane >> 1 & 7) * 4;
  const int x = warp % 4 * 32 + ((lane & 1) | (lane >> 3 & 2)) * 4;
  CopiedTiles<SIDE + 4> tiles(a, b, reinterpret_cast<float*>(pool), top, left, m, n, k);
  Squares<32, 16> squares;
  multiply(tiles, squares, y, x);
  squares.store(c, top + y, left + x, m, n);
}
