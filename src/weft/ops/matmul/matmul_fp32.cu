// c = a b in float32 by fma on the CUDA cores, without tensor cores.
//
// A block computes BM x BN of c, a warp 64 x 32, a thread 8 x 8 in registers as four 4 x 4 squares. K is
// taken 16 at a time through a pipeline of STAGES buffers in shared memory, filled by asynchronous copies.
// There both operands have K as the row, whatever their strides, so that a thread reads its 8 + 8 factors
// of one k as four float4: 64 fma per 4 shared loads. Bytes per block from global memory: (BM + BN) 4 K.
#include "async_copy.cuh"
#include "hopper/scheduler.cuh"
#include "numeric.cuh"

// 2 x 4 warps make a tile of 128 x 128; 3 stages of 16 x 264 floats are 50 KiB, so that two blocks fit on an
// SM.
#ifndef WARPS_M
#define WARPS_M 2
#define WARPS_N 4
#define STAGES 3
#define BLOCKS 2
#define A_MODE 0
#define B_MODE 2
#endif

namespace {

// How an operand is stored: K fastest; the other dimension fastest; the latter in aligned 16-byte groups.
enum Mode { ALONG_K, ACROSS, ACROSS_WIDE };

constexpr int BM = 64 * WARPS_M, BN = 32 * WARPS_N, BK = 16;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;

// Copies SPAN rows of a (or columns of b) by BK into shared memory as [k][span], pitch SPAN + 4. The
// padding of 4 puts the 8 k by 4 rows that a warp writes in mode ALONG_K into 32 different banks. Elements
// beyond K are filled with 0. Rows beyond the span's end repeat the last row: they only affect elements of
// c that are never stored.
template <int MODE, int SPAN> struct Loader {
  static constexpr int PITCH = SPAN + 4;
  static constexpr int ACROSS_LANES = MODE == ALONG_K ? THREADS / 8
                                      : MODE == ACROSS ? SPAN
                                                       : SPAN / 4;
  static constexpr int K_LANES = THREADS / ACROSS_LANES;
  static constexpr int PASSES = MODE == ALONG_K ? SPAN / ACROSS_LANES : 1;
  static_assert(THREADS % ACROSS_LANES == 0 && BK % K_LANES == 0, "lanes cover the tile");

  const float* at[PASSES];
  index_t k_stride;
  unsigned to;
  int k_left, valid;

  __device__ Loader(const float* base, index_t first, index_t extent, index_t stride,
                    index_t k_step, index_t k, float* shared)
      : k_stride(k_step) {
    const int tid = threadIdx.x;
    int s, lane;
    if constexpr (MODE == ALONG_K) {
      lane = tid % K_LANES;
      s = tid / K_LANES;
    } else {
      lane = tid / ACROSS_LANES;
      s = tid % ACROSS_LANES * (MODE == ACROSS_WIDE ? 4 : 1);
    }
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      index_t row = first + s + p * ACROSS_LANES;
      // Rows past the edge keep a valid address, since a copy of 0 bytes must not have an invalid one.
      if (row >= extent) row = MODE == ACROSS_WIDE ? 0 : extent - 1;
      at[p] = base + row * stride + lane * k_stride;
    }
    // At the edge a group of four may be cut: the copy reads `valid` bytes and fills the rest with 0.
    const index_t left = extent - first - s;
    valid = MODE != ACROSS_WIDE ? 4 : left >= 4 || left <= 0 ? 16 : 4 * (int)left;
    to = shared_address(shared + lane * PITCH + s);
    k_left = (int)k - lane;
  }

  // Copy the next BK of K into buffer number `stage`.
  __device__ __forceinline__ void next(int stage) {
    const unsigned here = to + stage * (BK * PITCH * 4);
#pragma unroll
    for (int j = 0; j < BK; j += K_LANES) {
      const bool inside = j < k_left;
#pragma unroll
      for (int p = 0; p < PASSES; ++p)
        copy_async<MODE == ACROSS_WIDE ? 16 : 4>(here + (j * PITCH + p * ACROSS_LANES) * 4,
                                                at[p] + j * k_stride,
                                                inside ? valid : 0);
    }
    k_left -= BK;
    // A pointer past the last tile is computed but never dereferenced: its copies have 0 bytes.
#pragma unroll
    for (int p = 0; p < PASSES; ++p) at[p] += BK * k_stride;
  }
};

// Two sets of factors: the next k's are read from shared memory while this k's are multiplied.
struct Factors { float a[8], b[8]; };

__device__ __forceinline__ void read_factors(Factors& f, const float* a, const float* b) {
  *reinterpret_cast<float4*>(f.a) = *reinterpret_cast<const float4*>(a);
  // 32 apart: a thread's second square of rows, 16 apart for columns. Within a square, lanes are 4 apart.
  *reinterpret_cast<float4*>(f.a + 4) = *reinterpret_cast<const float4*>(a + 32);
  *reinterpret_cast<float4*>(f.b) = *reinterpret_cast<const float4*>(b);
  *reinterpret_cast<float4*>(f.b + 4) = *reinterpret_cast<const float4*>(b + 16);
}

}  // namespace

// a: (M, K) and b: (K, N) by strides in elements; c: (M, N) contiguous, `wide` if float4 fits it.
// One block a tile of c; M, N, K > 0. Dynamic shared memory: STAGES * BK * (BM + BN + 8) floats.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
matmul(const float* a, const float* b, float* c, index_t m, index_t n, index_t k, index_t a_row,
       index_t a_column, index_t b_row, index_t b_column, index_t wide) {
  extern __shared__ float4 pool[];
  using LoadA = Loader<A_MODE, BM>;
  using LoadB = Loader<B_MODE, BN>;
  float* const a_tile = reinterpret_cast<float*>(pool);
  float* const b_tile = a_tile + STAGES * BK * LoadA::PITCH;

  const hopper::Tile tile =
      hopper::tile_at<8>(blockIdx.x, (int)((m + BM - 1) / BM), (int)((n + BN - 1) / BN));
  const index_t first_row = (index_t)tile.row * BM, first_column = (index_t)tile.column * BN;
  LoadA load_a(a, first_row, m, a_row, a_column, k, a_tile);
  LoadB load_b(b, first_column, n, b_column, b_row, k, b_tile);
  const int tiles = (int)((k + BK - 1) / BK);
#pragma unroll
  for (int t = 0; t < STAGES - 1; ++t) {
    if (t < tiles) load_a.next(t), load_b.next(t);
    // An empty group is committed as well, past the last tile: copies_wait counts groups, not tiles.
    copies_commit();
  }

  // Assignment of lanes to squares: neighbours share a's factors, and lanes two apart share b's. Each
  // float4 load of a warp then takes two passes over the banks instead of four.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / WARPS_N * 64 + (lane >> 1 & 7) * 4;
  const int column = warp % WARPS_N * 32 + ((lane & 1) | (lane >> 3 & 2)) * 4;

  // One fma chain for each element, in the order of k: the result does not depend on the tile size.
  float acc[8][8] = {};
  Factors f[2];
  copies_wait<STAGES - 2>();
  __syncthreads();
  read_factors(f[0], a_tile + row, b_tile + column);
  int stage = 0, fill = STAGES - 1;
  for (int t = 0; t < tiles; ++t) {
#pragma unroll
    for (int i = 0; i < BK; ++i) {
      if (i == BK - 1) {  // the last factors of this tile are in registers: advance to the next tile of K
        copies_wait<STAGES - 2>();
        __syncthreads();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
      const int at = stage * BK + (i + 1) % BK;
      read_factors(f[(i + 1) & 1], a_tile + at * LoadA::PITCH + row,
                   b_tile + at * LoadB::PITCH + column);
      if (i == 0) {  // since that barrier no thread reads the previous tile's buffer: refill it
        if (t + STAGES - 1 < tiles) load_a.next(fill), load_b.next(fill);
        copies_commit();
        fill = fill + 1 == STAGES ? 0 : fill + 1;
      }
#pragma unroll
      for (int y = 0; y < 8; ++y)
#pragma unroll
        for (int x = 0; x < 8; ++x) acc[y][x] = fmaf(f[i & 1].a[y], f[i & 1].b[x], acc[y][x]);
    }
  }

  // The accumulators are written from registers: the float4 of four lanes are 64 adjacent bytes of
  // a row.
  const index_t i = first_row + row, j = first_column + column;
  const int rows = (int)min(m - i, (index_t)64), columns = (int)min(n - j, (index_t)32);
  float* const first = c + i * n + j;
#pragma unroll
  for (int y = 0; y < 8; ++y) {
    const int down = y % 4 + y / 4 * 32;
    if (down >= rows) continue;
    float* const out = first + down * n;
#pragma unroll
    for (int x = 0; x < 8; x += 4) {
      const int across = x / 4 * 16;
      if (wide) {
        if (across < columns)
          *reinterpret_cast<float4*>(out + across) =
              make_float4(acc[y][x], acc[y][x + 1], acc[y][x + 2], acc[y][x + 3]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (across + e < columns) out[across + e] = acc[y][x + e];
      }
    }
  }
}
