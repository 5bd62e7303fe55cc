// c = a b by tensor cores through mma.sync: float16 and bfloat16 factors, or float32 truncated to tf32.
//
// A block computes BM x BN of c, a warp WM x WN of it in registers. 128 bytes of K (64 half types, 32
// float32) are taken at a time through a pipeline of STAGES buffers in shared memory, filled by
// asynchronous copies (operand_tile.cuh). float32 is passed unchanged: the tensor core ignores the lower 13
// bits, and rounding them first would take four instructions per factor.
#include "hopper/scheduler.cuh"
#include "operand_tile.cuh"

#ifndef WARPS_M
#define WARPS_M 2
#define WARPS_N 2
#define WM 64
#define WN 64
#define STAGES 3
#define BLOCKS 2
#define A_MODE 0
#define B_MODE 1
#endif

namespace {

constexpr int BM = WM * WARPS_M, BN = WN * WARPS_N, THREADS = 32 * WARPS_M * WARPS_N;

}  // namespace

// a: (M, K) and b: (K, N) by strides in elements; c: (M, N) contiguous, `wide` where pairs fit it.
// One block a tile of c; M, N, K > 0. Dynamic shared memory: STAGES * 128 * (BM + BN) bytes.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
matmul(const T* a, const T* b, T* c, index_t m, index_t n, index_t k, index_t a_row,
       index_t a_column, index_t b_row, index_t b_column, index_t wide) {
  extern __shared__ __align__(128) unsigned char pool[];
  using TileA = Tile<A_MODE, BM, THREADS>;
  using TileB = Tile<B_MODE, BN, THREADS>;
  constexpr int STAGE = TileA::BYTES + TileB::BYTES, MT = WM / 16, NT = WN / 16;

  const hopper::Tile tile =
      hopper::tile_at<8>(blockIdx.x, (int)((m + BM - 1) / BM), (int)((n + BN - 1) / BN));
  const index_t first_row = (index_t)tile.row * BM, first_column = (index_t)tile.column * BN;
  TileA tile_a(a, first_row, m, a_row, a_column, k);
  TileB tile_b(b, first_column, n, b_column, b_row, k);
  const unsigned shared = shared_address(pool);
  const int tiles = (int)((k + BK - 1) / BK);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / WARPS_N * WM, column = warp % WARPS_N * WN;

  // The layout of mma's result: lane / 4 is the row within 8, lane % 4 * 2 the column; [0], [1] are rows 0 to
  // 7, [2], [3] rows 8 to 15.
  float acc[MT][2 * NT][4] = {};
  // Double buffer in registers: the next step's fragments are loaded while this step's are multiplied.
  unsigned fa[2][MT][4], fb[2][NT][4];
  // A group is committed even when nothing is copied, so that copies_wait<STAGES - 2> counts correctly at the
  // end.
  auto fetch = [&](int t, int stage) {
    if (t < tiles) {
      tile_a.next(shared + stage * STAGE);
      tile_b.next(shared + stage * STAGE + TileA::BYTES);
    }
    copies_commit();
  };
  auto read = [&](int to, int stage, int step) {
    const unsigned at = shared + stage * STAGE;
#pragma unroll
    for (int y = 0; y < MT; ++y) fragment<true, TileA>(fa[to][y], at, row + y * 16, step);
#pragma unroll
    for (int x = 0; x < NT; ++x)
      fragment<false, TileB>(fb[to][x], at + TileA::BYTES, column + x * 16, step);
  };

#pragma unroll
  for (int t = 0; t < STAGES - 1; ++t) fetch(t, t);
  copies_wait<STAGES - 2>();
  __syncthreads();
  read(0, 0, 0);
  int stage = 0, fill = STAGES - 1;
  for (int t = 0; t < tiles; ++t) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (step == 3) {  // the last fragments of this tile are in registers: advance to the next tile of K
        copies_wait<STAGES - 2>();
        __syncthreads();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
      read((step + 1) & 1, stage, (step + 1) % 4);
      if (step == 0) {  // since that barrier no thread reads the previous tile's buffer: refill it
        fetch(t + STAGES - 1, fill);
        fill = fill + 1 == STAGES ? 0 : fill + 1;
      }
#pragma unroll
      for (int y = 0; y < MT; ++y)
#pragma unroll
        for (int x = 0; x < 2 * NT; ++x)
          multiply<T>(acc[y][x], fa[step & 1][y], fb[step & 1][x / 2][x % 2 * 2],
                      fb[step & 1][x / 2][x % 2 * 2 + 1]);
    }
  }

  // Stores of two elements: four lanes write 16 bytes (half types) or a 32-byte sector (float32) of one row.
  const index_t i = first_row + row + lane / 4;
  const index_t j = first_column + column + lane % 4 * 2;
  const int rows = (int)min(m - i, (index_t)WM), columns = (int)min(n - j, (index_t)WN);
  T* out = c + i * n + j;
#pragma unroll
  for (int y = 0; y < 2 * MT; ++y, out += 8 * n) {
    if (y * 8 >= rows) break;
#pragma unroll
    for (int x = 0; x < 2 * NT; ++x) {
      Vector<T, 2> pair;
      pair.at[0] = from_float<T>(acc[y / 2][x][y % 2 * 2]);
      pair.at[1] = from_float<T>(acc[y / 2][x][y % 2 * 2 + 1]);
      if (wide) {
        if (x * 8 < columns) *reinterpret_cast<Vector<T, 2>*>(out + x * 8) = pair;
      } else {
        if (x * 8 < columns) out[x * 8] = pair.at[0];
        if (x * 8 + 1 < columns) out[x * 8 + 1] = pair.at[1];
      }
    }
  }
}
