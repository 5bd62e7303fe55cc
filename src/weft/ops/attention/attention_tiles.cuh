// What attention's CUDA kernels share: tiles in shared memory, products of them, dropout's places.
//
// A tile has rows of one head, COLUMNS (HEAD, raised to a multiple of 32) wide, in 16-byte chunks
// whose place in the row is their number XOR a few bits of the row's, so that neither the copies in
// nor the reads (ldmatrix: eight rows at one chunk) meet in a bank. Columns past HEAD are 0.
//
// In a product a warp has 16 MT rows. Of each 16 x 8 of sums a lane has, in this order, two
// neighbours (columns lane % 4 * 2 on) of row lane / 4 and two of row lane / 4 + 8. Two such side
// by side, rounded and packed, are the first factor of a next product: no exchange between lanes.
#pragma once
#include "attention_words.cuh"
#include "philox.cuh"

#ifndef HEAD
#define HEAD 64
#define WARPS 4
#define MT 2
#define STEP 64
#define BLOCKS 2
#define SPLIT 1
#define DROPOUT 0
#endif
#ifndef AHEAD
#define AHEAD 4  // steps of 16 columns that the compiler may look ahead
#endif

namespace {

using T = WEFT_T;
constexpr int COLUMNS = (HEAD + 31) / 32 * 32, CHUNKS = COLUMNS / 8, ROW = COLUMNS * 2;
constexpr int THREADS = 32 * WARPS, ROWS = 16 * MT;  // ROWS: of a warp
constexpr int BLOCK = ROWS * WARPS;  // rows that a block owns; it walks STEP others
constexpr int OWN = BLOCK * ROW, WALKED = STEP * ROW;  // bytes of a tile
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_row() { return threadIdx.x / 32 * ROWS; }

// What chunk numbers of a row are XORed with: CHUNKS or, where that is an odd number of fours, two
// rows together fill all banks.
__device__ __forceinline__ int turn_of(int row) {
  return CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3;
}
__device__ __forceinline__ unsigned place(int row, int chunk) {
  return row * ROW + ((chunk ^ turn_of(row)) << 4);
}

// Where a lane points ldmatrix: DOWN, matrices 1 and 3 are those eight rows below 0 and 2, and 2
// and 3 a chunk to the right (a first factor; a second one that is turned); else the other way
// about.
template <bool DOWN> struct Pointer {
  unsigned row, turn;
  __device__ __forceinline__ Pointer() {
    const int lane = lane_id(), below = DOWN ? lane >> 3 & 1 : lane >> 4;
    const int right = DOWN ? lane >> 4 : lane >> 3 & 1;
    row = (below * 8 + lane % 8) * ROW;
    turn = (right ^ turn_of(lane % 8)) << 4;
  }
  // `first` is a multiple of 8; `sixteen` counts 16 columns.
  __device__ __forceinline__ unsigned at(unsigned tile, int first, int sixteen) const {
    return tile + row + first * ROW + ((sixteen * 32) ^ turn);
  }
};
using Down = Pointer<true>;
using Across = Pointer<false>;

template <int N> using Sums = float[MT][N / 8][4];
template <int N> using Packed = unsigned[N / 16][MT][4];

template <int N> __device__ __forceinline__ void clear(Sums<N>& sums) {
#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < N / 8; ++x)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[y][x][e] = 0.0f;
}

// sums += (the warp's 16 MT rows at `a`) (N rows at `b`)^T over all columns.
template <int N>
__device__ __forceinline__ void rows_by_rows(Sums<N>& sums, unsigned a, unsigned b) {
  const Down down;
  const Across across;
  // Not all at once: fragments would be fetched so early that addresses have to be spilled.
#pragma unroll AHEAD
  for (int i = 0; i < COLUMNS / 16; ++i) {
    unsigned fa[MT][4], fb[N / 16][4];
#pragma unroll
    for (int y = 0; y < MT; ++y) matrices<false>(fa[y], down.at(a, y * 16, i));
#pragma unroll
    for (int x = 0; x < N / 16; ++x) {
      matrices<false>(fb[x], across.at(b, x * 16, i));
#pragma unroll
      for (int y = 0; y < MT; ++y) {
        multiply<T>(sums[y][2 * x], fa[y], fb[x][0], fb[x][1]);
        multiply<T>(sums[y][2 * x + 1], fa[y], fb[x][2], fb[x][3]);
      }
    }
  }
}

// sums (N columns) += packed (16 MT x K) (K rows at `b`, columns from 16 `first` on).
template <int K, int N>
__device__ __forceinline__ void packed_by_rows(Sums<N>& sums, const Packed<K>& packed, unsigned b,
                                               int first = 0) {
  const Down down;
#pragma unroll
  for (int i = 0; i < K / 16; ++i) {
#pragma unroll
    for (int x = 0; x < N / 16; ++x) {
      unsigned fb[4];
      matrices<true>(fb, down.at(b, i * 16, first + x));
#pragma unroll
      for (int y = 0; y < MT; ++y) {
        multiply<T>(sums[y][2 * x], packed[i][y], fb[0], fb[1]);
        multiply<T>(sums[y][2 * x + 1], packed[i][y], fb[2], fb[3]);
      }
    }
  }
}

template <int N> __device__ __forceinline__ void pack(Packed<N>& packed, const Sums<N>& sums) {
#pragma unroll
  for (int i = 0; i < N / 16; ++i)
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* two = &sums[y][2 * i + j / 2][j % 2 * 2];
        packed[i][y][j] = pair<T>(two[0], two[1]);
      }
}

// Row `row` on of a head of this block's batch, found anew at each call: a pointer that goes along
// would take registers that sums have to give up.
__device__ __forceinline__ const T* rows_at(const T* x, index_t by_batch, index_t by_head,
                                            index_t by_row, int head, int row) {
  return x + (anew(blockIdx.z) * by_batch + anew(head) * by_head + row * by_row);
}

// Ask for N rows from `from` on, which lie `stride` apart; 0 from row `left` on and past HEAD. All
// threads of the block together.
template <int N>
__device__ __forceinline__ void ask(unsigned to, const T* from, int stride, int left) {
  // Where a row has a chunk for each of some threads, a thread keeps to one chunk, and its address
  // goes on by steps that are the same for all.
  constexpr bool EVEN = THREADS % CHUNKS == 0;
  constexpr int DOWN = EVEN ? THREADS / CHUNKS : 0;
  const int thread = thread_anew(), row0 = thread / CHUNKS, chunk0 = thread % CHUNKS;
  const T* at = from + (row0 * stride + chunk0 * 8);
#pragma unroll
  for (int i = 0; i < (N * CHUNKS + THREADS - 1) / THREADS; ++i, at += DOWN * stride) {
    const int number = thread + i * THREADS;
    if (N * CHUNKS % THREADS && number >= N * CHUNKS) break;
    const int chunk = EVEN ? chunk0 : number % CHUNKS;
    const int row = EVEN ? row0 + i * DOWN : number / CHUNKS;
    if constexpr (!EVEN) at = from + (row * stride + chunk * 8);
    const bool inside = row < left && (HEAD == COLUMNS || chunk * 8 < HEAD);
    copy_async(to + place(row, chunk), at, inside ? 16 : 0);
  }
}

// Keys and values of one head, of which `tiles` tiles of STEP rows are read one after another, two
// at a time in shared memory from `ring` on: one read, one on its way.
struct Keys {
  const T *k, *v;
  index_t k_batch, k_head, k_row, v_batch, v_head, v_row;
  int head, keys, tiles;  // which head, how many keys any query sees
  unsigned ring;

  __device__ __forceinline__ unsigned at(int t) const { return ring + t % 2 * (2 * WALKED); }
  __device__ __forceinline__ void fetch(int t) const {
    const T* k_at = rows_at(k, k_batch, k_head, k_row, head, t * STEP);
    const T* v_at = rows_at(v, v_batch, v_head, v_row, head, t * STEP);
    ask<STEP>(at(t), k_at, (int)k_row, keys - t * STEP);
    ask<STEP>(at(t) + WALKED, v_at, (int)v_row, keys - t * STEP);
  }
  // attend(t, masked) for each tile, the first of which has been asked for, that the warp's queries
  // from `first` on see: of a tile past its last query a warp sees nothing, and one before its
  // first needs no mask.
  template <typename Attend>
  __device__ __forceinline__ void walk(index_t causal, int first, Attend attend) const {
    for (int t = 0; t < tiles; ++t) {
      copies_wait<0>();
      __syncthreads();  // tile t is there, and nobody reads the tile before it any more
      if (t + 1 < tiles) fetch(t + 1);
      copies_commit();
      if ((t + 1) * STEP <= (causal ? min(keys, first + 1) : keys)) attend(t, false);
      else if (!causal || t * STEP < first + ROWS) attend(t, true);
    }
  }
};

// Write the warp's rows, N columns from column 8 `chunk` on, of a block that begins at row `start`:
// through the warp's own rows of a tile that nobody else reads, 16 bytes a lane. Rows from `count`
// on are not written.
template <int N>
__device__ __forceinline__ void write(const Sums<N>& sums, unsigned tile, T* to, index_t stride,
                                      int start, int count, int chunk = 0) {
  const int lane = lane_id(), first = warp_row();
  __syncwarp();
#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < N / 8; ++x)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + y * 16 + h * 8 + lane / 4;
        const unsigned v = pair<T>(sums[y][x][2 * h], sums[y][x][2 * h + 1]);
        shared_store(tile + place(row, chunk + x) + lane % 4 * 4, v);
      }
  __syncwarp();
  for (int i = lane; i < ROWS * (N / 8); i += 32) {
    const int row = first + i / (N / 8), at = chunk + i % (N / 8);
    if (start + row >= count || at * 8 >= HEAD) continue;
    unsigned v[4];
    shared_load(v, tile + place(row, at));
    *reinterpret_cast<uint4*>(to + (index_t)(start + row) * stride + at * 8) =
        make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// Which weights dropout keeps, by their row-major place in a (B H, Tq, Tk) tensor.
struct Kept {
  unsigned long long seed;
  index_t threshold;

  static __device__ __forceinline__ unsigned word(const Words& words, int i) {
    return i < 2 ? (i == 0 ? words.at[0] : words.at[1]) : (i == 2 ? words.at[2] : words.at[3]);
  }
  // Of the weights at `at` and `step` on: bits 0 and 1.
  __device__ __forceinline__ unsigned two(index_t at, index_t step) const {
    Words words = philox(seed, (unsigned long long)at / 4);
    const bool first = word(words, (int)(at & 3)) >= threshold;
    at += step;
    if (step != 1 || (at & 3) == 0) words = philox(seed, (unsigned long long)at / 4);
    return first | (word(words, (int)(at & 3)) >= threshold) << 1;
  }
  // Of a tile of N columns, all that a lane has, as bits in the order of its sums. The first is at
  // `at`; a row down and a column right are so many places on. A loop as it stands: unrolled, these
  // random numbers are ten times the rest of the kernel.
  template <int N>
  __device__ __forceinline__ unsigned long long bits(index_t at, index_t down,
                                                     index_t right) const {
    unsigned long long found = 0;
#pragma unroll 1
    for (int i = 0; i < MT * N / 4; ++i) {
      const int h = i % 2, x = i / 2 % (N / 8), y = i / 2 / (N / 8);
      const index_t here = at + (y * 16 + h * 8) * down + x * 8 * right;
      found |= (unsigned long long)two(here, right) << (2 * i);
    }
    return found;
  }
};

// to = from where kept, times `scale`, else 0.
template <int N>
__device__ __forceinline__ void drop(Sums<N>& to, const Sums<N>& from, unsigned long long kept,
                                     float scale) {
#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < N / 8; ++x)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        to[y][x][e] = kept >> ((y * (N / 8) + x) * 4 + e) & 1 ? from[y][x][e] * scale : 0.0f;
}

// How many keys a batch's queries see: its length where there are any, within [0, tk].
__device__ __forceinline__ int keys_of(const int* lengths, int batch, index_t tk) {
  return lengths ? min(max(lengths[batch], 0), (int)tk) : (int)tk;
}

}  // namespace
