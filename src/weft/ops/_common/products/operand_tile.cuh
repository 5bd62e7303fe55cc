// A tile of one operand of a product by mma.sync: its copy into shared memory, and its fragments.
//
// An operand keeps its storage order in shared memory, in 16-byte chunks swizzled by XOR of the chunk's
// number with the row's, so that neither the copies nor the loads (ldmatrix, transposing where K is not the
// fastest dimension) have bank conflicts. 128 bytes of K are one tile. Source of the fragment layouts:
// NVIDIA's PTX ISA, mma.m16n8k16 and .m16n8k8.
#pragma once
#include "mma_ptx.cuh"

namespace {

// How an operand is stored: K fastest or the other dimension, in aligned 16-byte chunks or not.
enum Mode { ALONG_K, ACROSS, ALONG_K_ANY, ACROSS_ANY };

using T = WEFT_T;
constexpr bool HALF = sizeof(T) == 2;
constexpr int CHUNK = 16 / sizeof(T);   // elements in 16 bytes
constexpr int BK = 128 / sizeof(T);     // elements of K at a time

// One operand's tile: SPAN rows of a (columns of b) by BK, copied by THREADS threads. Rows beyond the
// operand's end repeat the last one, or with ZERO_ROWS are filled with zeros and not read.
template <int MODE, int SPAN, int THREADS, bool ZERO_ROWS = false> struct Tile {
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
    return row * ROW + ((chunk ^ (swizzle & (ROW / 16 - 1))) << 4);
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
        copy_async<16>(to + byte(s, chunk), at + min(s, last) * stride, ZERO_ROWS && s > last ? 0 : bytes);
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
      shared_store(at, v);
    }
  }
};

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
      r[q] = shared_word(tile + Operand::byte(i, at / 4) + at % 4 * 4);
    }
  }
}

}  // namespace
