// c = a b by tensor cores through mma.sync: float16 and bfloat16 factors, or float32 truncated to tf32.
//
// A block computes BM x BN of c, a warp WM x WN of it in registers. 128 bytes of K (64 half types, 32
// float32) are taken at a time through a pipeline of STAGES buffers in shared memory, filled by
// asynchronous copies. An operand keeps its storage order there, in 16-byte chunks swizzled by XOR of the
// chunk's number with the row's, so that neither the copies nor the loads (ldmatrix, transposing where K is
// not the fastest dimension) have bank conflicts. float32 is passed unchanged: the tensor core ignores the
// lower 13 bits, and rounding them first would take four instructions per factor. Source of the fragment
// layouts: NVIDIA's PTX ISA, mma.m16n8k16 and .m16n8k8.
#include "ldmatrix.cuh"
#include "async_copy.cuh"
#include "tiles.cuh"

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

// How an operand is stored: K fastest or the other dimension, in aligned 16-byte chunks or not.
enum Mode { ALONG_K, ACROSS, ALONG_K_ANY, ACROSS_ANY };

using T = WEFT_T;
template <typename U> constexpr bool is_bfloat16 = false;
template <> constexpr bool is_bfloat16<__nv_bfloat16> = true;
constexpr bool HALF = sizeof(T) == 2;
constexpr int CHUNK = 16 / sizeof(T);   // elements in 16 bytes
constexpr int BK = 128 / sizeof(T);     // elements of K at a time
constexpr int BM = WM * WARPS_M, BN = WN * WARPS_N, THREADS = 32 * WARPS_M * WARPS_N;

// One operand's tile: SPAN rows of a (columns of b) by BK.
template <int MODE, int SPAN> struct Tile {
  static constexpr bool BY_K = MODE == ALONG_K || MODE == ALONG_K_ANY;  // a row is 128 bytes of K
  static constexpr bool WIDE = MODE == ALONG_K || MODE == ACROSS;
  static constexpr int ROW = BY_K ? 128 : SPAN * (int)sizeof(T);
  static constexpr int BYTES = SPAN * 128;

  // The XOR maps the same chunk of 8 consecutive rows to 8 different groups of 4 banks: ldmatrix reads such a
  // column of chunks in one pass.
  // The byte at which chunk `chunk` of row `row` begins.
  static __device__ __forceinline__ int byte(int row, int chunk) {
    // float32 with another dimension than K fastest is read word by word, 4 rows at a time (see fragment).
    const int swizzle = BY_K || HALF ? row & 7 : (row & 3) << 1;
    return row * ROW + ((chunk ^ swizzle) << 4);
  }

  const T* from;  // the first element that this thread copies of the next tile of K
  index_t stride, k_stride;
  int last, k_left;  // the last row of the span that exists; elements of K left from `from` on
  int valid;         // bytes of a 16-byte chunk that exist, where K is not the fastest dimension

  __device__ __forceinline__ Tile(const T* base, index_t first, index_t extent, index_t stride,
                                  index_t k_stride, index_t k)
      : stride(stride), k_stride(k_stride), last((int)min(extent - 1 - first, (index_t)SPAN)),
        k_left((int)k), valid(16) {
    from = base + first * stride;
    if constexpr (MODE == ALONG_K) {
      k_left -= threadIdx.x % 8 * CHUNK;
      from += threadIdx.x % 8 * CHUNK;
    } else if constexpr (MODE == ACROSS) {
      const int s = threadIdx.x % (SPAN / CHUNK) * CHUNK, lane = threadIdx.x / (SPAN / CHUNK);
      // A chunk beyond the span's end repeats the first one, so that its address is valid.
      if (s <= last) {
        from += s;
        valid = min(CHUNK, last + 1 - s) * (int)sizeof(T);
      }
      k_left -= lane;
      from += lane * k_stride;
    }
  }

  // Copy the next tile of K to the shared address `to`. Elements beyond K are filled with 0; rows beyond
  // the span's end only affect elements of c that are never stored.
  __device__ __forceinline__ void next(unsigned to) {
    if constexpr (MODE == ALONG_K) {
      const int chunk = threadIdx.x % 8;
      const int bytes = min(max(k_left, 0), CHUNK) * (int)sizeof(T);
      // Beyond K no byte is read, but the address must stay in bounds: use the start of the row.
      const T* const at = bytes ? from : from - chunk * CHUNK;
#pragma unroll
      for (int i = 0; i < SPAN / (THREADS / 8); ++i) {
        const int s = threadIdx.x / 8 + i * (THREADS / 8);
        copy_async<16>(to + byte(s, chunk), at + min(s, last) * stride, bytes);
      }
      from += BK;
    } else if constexpr (MODE == ACROSS) {
      constexpr int CHUNKS = SPAN / CHUNK, DOWN = THREADS / CHUNKS;
      const int chunk = threadIdx.x % CHUNKS, lane = threadIdx.x / CHUNKS;
#pragma unroll
      for (int i = 0; i < BK; i += DOWN)
        copy_async<16>(to + byte(lane + i, chunk), from + i * k_stride, i < k_left ? valid : 0);
      from += BK * k_stride;
    } else {
      load_any(to);
      from += BK * k_stride;
    }
    k_left -= BK;
  }

  // Any strides and alignment: one element at a time, through registers.
  __device__ __forceinline__ void load_any(unsigned to) const {
#pragma unroll 4
    for (int e = threadIdx.x; e < SPAN * BK; e += THREADS) {
      const int s = BY_K ? e / BK : e % SPAN, i = BY_K ? e % BK : e / SPAN;
      const bool inside = s <= last && i < k_left;
      const T v = inside ? from[s * stride + i * k_stride] : from_float<T>(0.f);
      const int row = BY_K ? s : i, within = BY_K ? i : s;
      const unsigned at = to + byte(row, within / CHUNK) + within % CHUNK * (int)sizeof(T);
      if constexpr (HALF)
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(*reinterpret_cast<const short*>(&v))
                     : "memory");
      else
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(*reinterpret_cast<const float*>(&v))
                     : "memory");
    }
  }
};

__device__ __forceinline__ unsigned word(unsigned at) {
  unsigned v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

// The 16 (rows of a, or columns of b) x 32 bytes of K at (s, step) as four registers of a lane:
// quarter q holds rows s + 8 (q & 1) and K half q >> 1 for a; for b the two change places.
template <bool IS_A, typename Operand>
__device__ __forceinline__ void fragment(unsigned (&r)[4], unsigned tile, int s, int step) {
  const int lane = threadIdx.x % 32, quarter = lane / 8;
  const int down = IS_A ? quarter & 1 : quarter >> 1, along = IS_A ? quarter >> 1 : quarter & 1;
  if constexpr (Operand::BY_K) {
    ldmatrix_x4<false>(r, tile + Operand::byte(s + down * 8 + lane % 8, step * 2 + along));
  } else if constexpr (HALF) {
    ldmatrix_x4<true>(r, tile + Operand::byte(step * 16 + along * 8 + lane % 8, s / 8 + down));
  } else {
    // ldmatrix turns pairs of 16 bits only: float32 whose fastest dimension is not K word by word.
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int i = step * 8 + (IS_A ? q >> 1 : q & 1) * 4 + lane % 4;
      const int at = s + (IS_A ? q & 1 : q >> 1) * 8 + lane / 4;
      r[q] = word(tile + Operand::byte(i, at / 4) + at % 4 * 4);
    }
  }
}

#define WEFT_MMA(SHAPE, TYPE)                                                                \
  asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "               \
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"             \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], const unsigned* b) {
  if constexpr (!HALF) WEFT_MMA("m16n8k8", "tf32");
  else if constexpr (is_bfloat16<T>) WEFT_MMA("m16n8k16", "bf16");
  else WEFT_MMA("m16n8k16", "f16");
}

}  // namespace

// a: (M, K) and b: (K, N) by strides in elements; c: (M, N) contiguous, `wide` where pairs fit it.
// One block a tile of c; M, N, K > 0. Dynamic shared memory: STAGES * 128 * (BM + BN) bytes.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
matmul(const T* a, const T* b, T* c, index_t m, index_t n, index_t k, index_t a_row,
       index_t a_column, index_t b_row, index_t b_column, index_t wide) {
  extern __shared__ __align__(128) unsigned char pool[];
  using TileA = Tile<A_MODE, BM>;
  using TileB = Tile<B_MODE, BN>;
  constexpr int STAGE = TileA::BYTES + TileB::BYTES, MT = WM / 16, NT = WN / 16;

  const TilePosition tile = tile_position(blockIdx.x, (int)((m + BM - 1) / BM), (int)((n + BN - 1) / BN));
  TileA tile_a(a, tile.row * BM, m, a_row, a_column, k);
  TileB tile_b(b, tile.column * BN, n, b_column, b_row, k);
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
          multiply(acc[y][x], fa[step & 1][y], &fb[step & 1][x / 2][x % 2 * 2]);
    }
  }

  // Stores of two elements: four lanes write 16 bytes (half types) or a 32-byte sector (float32) of one row.
  const index_t i = tile.row * BM + row + lane / 4;
  const index_t j = tile.column * BN + column + lane % 4 * 2;
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
