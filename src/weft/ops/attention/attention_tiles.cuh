// Device code of attention's CUDA kernels: launch arguments, tiles in shared memory, their products, dropout.
//
// A tile holds rows of one head. A row is COLUMNS wide (HEAD rounded up to a multiple of 32; the columns past
// HEAD are 0) and is stored as 16-byte chunks. The position of a chunk in its row is its number XOR a few
// bits of the row's number (a swizzle). Neither the copies into a tile nor the reads by ldmatrix, eight rows
// at one chunk, then have bank conflicts.
//
// In a product a warp has 16 MT rows. Of each 16 x 8 block of accumulators a lane has four, in this order:
// two neighbours (columns lane % 4 * 2 and the next) of row lane / 4, and two of row lane / 4 + 8. Two such
// blocks side by side, rounded and packed, are the first factor of the next mma: lanes exchange nothing.
#pragma once
#include "attention_ptx.cuh"
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
#define AHEAD 4  // steps of 16 columns that are unrolled, so that their fragments are loaded in advance
#endif

using T = WEFT_T;

// A tensor of heads (B, H or Hkv, T, HEAD). Strides are in elements; columns are adjacent and every row is
// 16-byte aligned.
struct HeadTensor {
  T* data;
  index_t batch_stride, head_stride, row_stride;
};

// Arguments of one launch, passed by value. with_cuda.py declares the same fields in the same order; a kernel
// that does not use a field gets 0 there.
struct AttentionArgs {
  HeadTensor q, k, v, grad, out, dq, dk, dv;
  const int* lengths;  // (B,): visible keys of each batch; null: all
  float* lse;          // (B, H, Tq): log-sum-exp of each query's scores
  float* row_terms;    // (B, H, 2, padded_tq): log2(e) lse and rowsum(out grad), for the backward
  index_t heads, group, tq, tk, padded_tq;  // `group` query heads share one head of keys
  index_t causal, seed, threshold;          // a weight whose random word is below threshold is dropped
  float scale_log2;                         // scale * log2(e): exponentials are powers of 2
  float scale;
  float rescale;                            // factor of the weights that dropout keeps
};

namespace {

// 32 columns of a 16-bit type are 64 bytes, so that the swizzle always has four chunks or more to permute.
constexpr int COLUMNS = (HEAD + 31) / 32 * 32, CHUNKS = COLUMNS / 8, ROW_BYTES = COLUMNS * 2;
constexpr int THREADS = 32 * WARPS, WARP_ROWS = 16 * MT;
constexpr int BLOCK_ROWS = WARP_ROWS * WARPS;  // rows whose results a block computes
constexpr int BLOCK_TILE = BLOCK_ROWS * ROW_BYTES;  // bytes of a tile of the block's own rows
constexpr int STEP_TILE = STEP * ROW_BYTES;         // bytes of a tile of the rows that are streamed
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// A macro, since NVRTC has no <limits> and a constexpr float cannot be made from bits.
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_row() { return threadIdx.x / 32 * WARP_ROWS; }

// Return the bits that the chunk numbers of a row are XORed with. Where CHUNKS is an odd multiple of 4, two
// rows together fill all banks, and the pattern advances every second row.
// A row of 8 k chunks is a multiple of 128 bytes, which is all 32 banks: without a swizzle the same chunk of
// eight rows would be in the same four banks, an eightfold conflict of ldmatrix.
__device__ __forceinline__ int swizzle(int row) {
  return CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3;
}
__device__ __forceinline__ unsigned chunk_offset(int row, int chunk) {
  return row * ROW_BYTES + ((chunk ^ swizzle(row)) << 4);
}

// Address that a lane gives to ldmatrix, which loads four 8 x 8 matrices. DOWN: matrices 1 and 3 are the
// eight rows below 0 and 2, and 2 and 3 are one chunk to the right (a first factor, or a transposed second
// one). Otherwise the two directions are exchanged (a second factor).
template <bool DOWN> struct LdmatrixAddress {
  unsigned row_offset, flip;
  __device__ __forceinline__ LdmatrixAddress() {
    const int lane = lane_id(), below = DOWN ? lane >> 3 & 1 : lane >> 4;
    const int right = DOWN ? lane >> 4 : lane >> 3 & 1;
    row_offset = (below * 8 + lane % 8) * ROW_BYTES;
    flip = (right ^ swizzle(lane % 8)) << 4;
  }
  // `first` is a multiple of 8, so that the swizzle depends on the lane alone; `sixteen` counts 16 columns.
  __device__ __forceinline__ unsigned at(unsigned tile, int first, int sixteen) const {
    return tile + row_offset + first * ROW_BYTES + ((sixteen * 32) ^ flip);
  }
};
using FirstFactor = LdmatrixAddress<true>;
using SecondFactor = LdmatrixAddress<false>;

// Registers are arrays of fixed size, indexed by unrolled loops only: an index that is known at run time
// would move the array to local memory.
template <int N> using Accumulators = float[MT][N / 8][4];
template <int N> using Fragments = unsigned[N / 16][MT][4];

template <int N> __device__ __forceinline__ void clear(Accumulators<N>& sums) {
#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < N / 8; ++x)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[y][x][e] = 0.0f;
}

// sums += A B^T over all columns: A is the warp's 16 MT rows at `a`, B the N rows at `b`.
template <int N>
__device__ __forceinline__ void multiply_transposed(Accumulators<N>& sums, unsigned a, unsigned b) {
  const FirstFactor a_address;
  const SecondFactor b_address;
  // Unrolled by AHEAD only: a full unroll loads fragments so early that addresses spill.
#pragma unroll AHEAD
  for (int i = 0; i < COLUMNS / 16; ++i) {
    unsigned fa[MT][4], fb[N / 16][4];
#pragma unroll
    for (int y = 0; y < MT; ++y) ldmatrix_x4<false>(fa[y], a_address.at(a, y * 16, i));
#pragma unroll
    for (int x = 0; x < N / 16; ++x) {
      ldmatrix_x4<false>(fb[x], b_address.at(b, x * 16, i));
#pragma unroll
      for (int y = 0; y < MT; ++y) {
        multiply<T>(sums[y][2 * x], fa[y], fb[x][0], fb[x][1]);
        multiply<T>(sums[y][2 * x + 1], fa[y], fb[x][2], fb[x][3]);
      }
    }
  }
}

// sums (N columns) += A B: A (16 MT x K) is in registers, B is K rows at `b`, from column 16 `first` on.
template <int K, int N>
__device__ __forceinline__ void multiply_packed(Accumulators<N>& sums, const Fragments<K>& a, unsigned b,
                                                int first = 0) {
  const FirstFactor b_address;  // ldmatrix transposes: B's rows are the dimension that is summed over
#pragma unroll
  for (int i = 0; i < K / 16; ++i) {
#pragma unroll
    for (int x = 0; x < N / 16; ++x) {
      unsigned fb[4];
      ldmatrix_x4<true>(fb, b_address.at(b, i * 16, first + x));
#pragma unroll
      for (int y = 0; y < MT; ++y) {
        multiply<T>(sums[y][2 * x], a[i][y], fb[0], fb[1]);
        multiply<T>(sums[y][2 * x + 1], a[i][y], fb[2], fb[3]);
      }
    }
  }
}

// Round accumulators to T and pack them as the first factor of the next product.
template <int N>
__device__ __forceinline__ void pack(Fragments<N>& packed, const Accumulators<N>& sums) {
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

// Return the address of a row of this block's batch, computed again at each call: a pointer that is advanced
// in the loop would take registers that the accumulators need.
__device__ __forceinline__ const T* row_address(const HeadTensor& x, int head, int row) {
  return x.data +
         (opaque(blockIdx.z) * x.batch_stride + opaque(head) * x.head_stride + row * x.row_stride);
}

// Start asynchronous copies of N rows, `stride` elements apart, into a tile. Rows from `count` on and columns
// past HEAD are filled with 0. All threads of the block take part.
template <int N>
__device__ __forceinline__ void load_tile(unsigned tile, const T* from, int stride, int count) {
  // If the block has whole rows of chunks, a thread copies the same chunk of every row it takes, and its
  // address advances by a step that is the same for all threads.
  constexpr bool EVEN = THREADS % CHUNKS == 0;
  constexpr int ROW_STEP = EVEN ? THREADS / CHUNKS : 0;
  const int thread = opaque_thread(), row0 = thread / CHUNKS, chunk0 = thread % CHUNKS;
  const T* at = from + (row0 * stride + chunk0 * 8);
#pragma unroll
  for (int i = 0; i < (N * CHUNKS + THREADS - 1) / THREADS; ++i, at += ROW_STEP * stride) {
    // The break is compiled only if the tile's chunks are no multiple of the threads.
    const int number = thread + i * THREADS;
    if (N * CHUNKS % THREADS && number >= N * CHUNKS) break;
    const int chunk = EVEN ? chunk0 : number % CHUNKS;
    const int row = EVEN ? row0 + i * ROW_STEP : number / CHUNKS;
    if constexpr (!EVEN) at = from + (row * stride + chunk * 8);
    const bool inside = row < count && (HEAD == COLUMNS || chunk * 8 < HEAD);
    copy_async(tile + chunk_offset(row, chunk), at, inside ? 16 : 0);
  }
}

// Double-buffered stream of one head's keys and values: `tiles` tiles of STEP rows, two at a time in shared
// memory from `buffer` on. One is read while the next is copied.
struct KeyValueStream {
  const HeadTensor &k, &v;
  int head, keys, tiles;  // the head of keys; the number of keys that any query of the block sees
  unsigned buffer;

  __device__ __forceinline__ unsigned at(int t) const { return buffer + t % 2 * (2 * STEP_TILE); }
  __device__ __forceinline__ void load(int t) const {
    const T* k_from = row_address(k, head, t * STEP);
    const T* v_from = row_address(v, head, t * STEP);
    load_tile<STEP>(at(t), k_from, (int)k.row_stride, keys - t * STEP);
    load_tile<STEP>(at(t) + STEP_TILE, v_from, (int)v.row_stride, keys - t * STEP);
  }
  // Call attend(t, masked) for each tile that the warp's queries, from `first` on, see. Tile 0 is already
  // requested. A tile past the warp's last query is skipped; one that all its queries see needs no mask.
  template <typename Attend>
  __device__ __forceinline__ void for_each_tile(index_t causal, int first, Attend attend) const {
    for (int t = 0; t < tiles; ++t) {
      // At most one group is in flight here, that of tile t.
      copies_wait<0>();
      __syncthreads();  // tile t is complete for all threads, and no warp still reads the other buffer
      if (t + 1 < tiles) load(t + 1);
      // Every thread commits in every iteration, also without a copy, so that the count of groups stays
      // uniform.
      copies_commit();
      if ((t + 1) * STEP <= (causal ? min(keys, first + 1) : keys)) attend(t, false);
      else if (!causal || t * STEP < first + WARP_ROWS) attend(t, true);
    }
  }
};

// Write the warp's rows, N columns from column 8 `chunk` on, of a block that begins at row `start`. They go
// through the warp's own rows of `tile`, which no other warp reads, so that a lane stores 16 bytes at a time.
// Rows from `count` on are not written.
template <int N>
__device__ __forceinline__ void store_rows(const Accumulators<N>& sums, unsigned tile, T* to, index_t stride,
                                           int start, int count, int chunk = 0) {
  const int lane = lane_id(), first = warp_row();
  __syncwarp();  // the warp's last ldmatrix of these rows is done
#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < N / 8; ++x)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + y * 16 + h * 8 + lane / 4;
        const unsigned v = pair<T>(sums[y][x][2 * h], sums[y][x][2 * h + 1]);
        shared_store(tile + chunk_offset(row, chunk + x) + lane % 4 * 4, v);
      }
  __syncwarp();
  for (int i = lane; i < WARP_ROWS * (N / 8); i += 32) {
    const int row = first + i / (N / 8), at = chunk + i % (N / 8);
    // The columns that pad HEAD to COLUMNS exist in shared memory only.
    if (start + row >= count || at * 8 >= HEAD) continue;
    unsigned v[4];
    shared_load(v, tile + chunk_offset(row, at));
    *reinterpret_cast<uint4*>(to + (index_t)(start + row) * stride + at * 8) =
        make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// Dropout's mask: random words numbered by a weight's row-major index in a (B H, Tq, Tk) tensor, so that the
// forward, both backward kernels and every other implementation drop the same weights.
struct DropoutMask {
  unsigned long long seed;
  index_t threshold;

  // Bits 0 and 1: whether the weights `at` and `at + step` are kept. One Philox call has four words.
  __device__ __forceinline__ unsigned two(index_t at, index_t step) const {
    // A lane's two neighbouring weights usually share a block of four words; the second call is needed only
    // if the pair crosses a block or lies in two rows (the transposed tile of attention_keys).
    auto words = philox(seed, (unsigned long long)at / 4);
    const bool first = words.of((int)(at & 3)) >= threshold;
    at += step;
    if (step != 1 || (at & 3) == 0) words = philox(seed, (unsigned long long)at / 4);
    return first | (words.of((int)(at & 3)) >= threshold) << 1;
  }
  // Return the bits of all weights that a lane has of a tile of N columns, in the order of its accumulators.
  // The first weight is `at`; `row_step` and `column_step` lead to the next row and column. The loop is not
  // unrolled: unrolled, the random numbers were ten times the code of the rest of the kernel.
  template <int N>
  __device__ __forceinline__ unsigned long long bits(index_t at, index_t row_step,
                                                     index_t column_step) const {
    unsigned long long mask = 0;
#pragma unroll 1
    for (int i = 0; i < MT * N / 4; ++i) {
      const int h = i % 2, x = i / 2 % (N / 8), y = i / 2 / (N / 8);
      const index_t here = at + (y * 16 + h * 8) * row_step + x * 8 * column_step;
      mask |= (unsigned long long)two(here, column_step) << (2 * i);
    }
    return mask;
  }
};

// to = from times `scale` where the mask has a 1, else 0.
template <int N>
__device__ __forceinline__ void apply_dropout(Accumulators<N>& to, const Accumulators<N>& from,
                                              unsigned long long mask, float scale) {
#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int x = 0; x < N / 8; ++x)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        to[y][x][e] = mask >> ((y * (N / 8) + x) * 4 + e) & 1 ? from[y][x][e] * scale : 0.0f;
}

// Return the number of keys that a batch's queries see: its length, clamped to [0, tk].
// A length from the device cannot be checked by the host without a wait: it is clamped, so that no read
// leaves the tensor.
__device__ __forceinline__ int visible_keys(const int* lengths, int batch, index_t tk) {
  return lengths ? min(max(lengths[batch], 0), (int)tk) : (int)tk;
}

}  // namespace
