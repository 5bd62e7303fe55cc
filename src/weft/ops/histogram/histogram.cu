// Histogram by counters in shared memory, of which every lane of a warp has its own.
//
// A block has COLUMNS counters for each bin, and a lane uses those of its own column. With 32 columns, a
// column is a bank of shared memory: the 32 additions of a warp never meet in a bank, whatever the elements
// are. The warps of a block share the counters, so that additions are atomic. A thread adds equal elements of
// a vector at once, so that a constant input does not wait for one counter. At its end, a block sums its
// columns and adds them to the counts. Sums of integers have the same bits in every order.
// Bytes: x read once; a count of 8 bytes is added for each bin and block.
#include "bins.cuh"

#ifndef COLUMNS
#define COLUMNS 32
#endif
#ifndef THREADS
#define THREADS 512
#endif

constexpr int VEC = 16 / (int)sizeof(WEFT_T);
constexpr int UNROLL = 4;                // vectors of a thread that are loaded before the first is used
constexpr int TABLE = 8192;              // counters of a block: 32 KiB
constexpr int TILE_VECS = THREADS * UNROLL;
constexpr bool BYTES = sizeof(WEFT_T) == 1;
static_assert(!BYTES || COLUMNS == 32, "of bytes, every lane has 256 counters, whatever the call's bins");
constexpr unsigned ALL = 0xffffffffu;
using Pack = Vector<WEFT_T, VEC>;

// 32 bits are enough: a block would have to count 2^32 elements of one bin in one column.
__device__ __forceinline__ void add(unsigned* table, int bin, unsigned lane, unsigned count) {
  if (bin != NONE) atomicAdd(table + (bin * COLUMNS + lane), count);
}

// Counts a vector of floats or of int32.
__device__ __forceinline__ void count_elements(unsigned* table, const Pack& pack, unsigned lane,
                                               const Bins& bins) {
  int number[VEC];
  bool equal = true;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    number[j] = bin_of(pack.at[j], bins);
    equal &= number[j] == number[0];
  }
  if (equal) {
    add(table, number[0], lane, VEC);
    return;
  }
#pragma unroll
  for (int j = 0; j < VEC; ++j) add(table, number[j], lane, 1u);
}

// Counts 16 bytes. A byte needs no test, since there are 256 bins: those past the call's are never read.
__device__ __forceinline__ void count_bytes(unsigned* table, const uint4& v, unsigned lane) {
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
  // Equal words, and a word equal to itself one byte on.
  if (v.x == v.y && v.x == v.z && v.x == v.w && v.x == (v.x << 8 | v.x >> 24)) {
    atomicAdd(table + ((v.x & 255) * COLUMNS + lane), 16u);
    return;
  }
  // A byte is shifted to where it is the offset of its counter at once: two instructions and an addition.
  constexpr int SHIFT = 7;  // log2 of the bytes of a bin's 32 counters
  char* own = reinterpret_cast<char*>(table + lane);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned shifted = k == 0 ? words[i] << SHIFT : words[i] >> (8 * k - SHIFT);
      atomicAdd(reinterpret_cast<unsigned*>(own + (shifted & 255u << SHIFT)), 1u);
    }
}

__device__ __forceinline__ void count_vector(unsigned* table, const WEFT_T* at, unsigned lane,
                                             const Bins& bins) {
  if constexpr (BYTES) count_bytes(table, *reinterpret_cast<const uint4*>(at), lane);
  else count_elements(table, *reinterpret_cast<const Pack*>(at), lane, bins);
}

// Counts the elements that no aligned vector has: `head` at the start of x, and the rest after `vectors`.
__device__ __forceinline__ void count_ends(unsigned* table, const WEFT_T* x, index_t n, index_t head,
                                           index_t vectors, unsigned lane, const Bins& bins) {
  const index_t tail = head + vectors * VEC;
  for (index_t i = threadIdx.x; i < head + (n - tail); i += THREADS)
    add(table, bin_of(x[i < head ? i : tail + (i - head)], bins), lane, 1u);
}

// x: (n,), aligned to its elements; counts: (bins,), zeros before the launch; bins * COLUMNS <= TABLE, but of
// bytes any number of bins.
extern "C" __global__ void __launch_bounds__(THREADS)
count_in_shared(const WEFT_T* __restrict__ x, Count* counts, index_t n, index_t bin_count, double low,
                double high, double scale) {
  __shared__ unsigned table[TABLE];
  const Bins bins = bins_from(bin_count, low, high, scale);
  const int rows = BYTES ? 256 : bins.count, lane = threadIdx.x % COLUMNS;
  for (int i = threadIdx.x; i < rows * COLUMNS; i += THREADS) table[i] = 0;
  __syncthreads();
  const index_t past = (index_t)(reinterpret_cast<size_t>(x) % 16 / sizeof(WEFT_T));
  const index_t head = min((VEC - past) % VEC, n), vectors = (n - head) / VEC;
  const WEFT_T* first = x + head;
  if (blockIdx.x == 0) count_ends(table, x, n, head, vectors, lane, bins);
  for (index_t tile = blockIdx.x; tile * TILE_VECS < vectors; tile += gridDim.x) {
    const index_t start = tile * TILE_VECS + threadIdx.x;
    if ((tile + 1) * TILE_VECS <= vectors) {
      // All loads are issued before the first is used.
      uint4 v[UNROLL];
#pragma unroll
      for (int k = 0; k < UNROLL; ++k)
        v[k] = *reinterpret_cast<const uint4*>(first + (start + k * THREADS) * VEC);
#pragma unroll
      for (int k = 0; k < UNROLL; ++k) {
        if constexpr (BYTES) {
          count_bytes(table, v[k], lane);
        } else {
          Pack pack;
          memcpy(&pack, &v[k], 16);
          count_elements(table, pack, lane, bins);
        }
      }
    } else {
      for (int k = 0; k < UNROLL; ++k)
        if (start + k * THREADS < vectors)
          count_vector(table, first + (start + k * THREADS) * VEC, lane, bins);
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < min(rows, bins.count); bin += THREADS) {
    // Threads begin at columns beside each other, which are different banks.
    Count sum = 0;
    for (int c = 0; c < COLUMNS; ++c) sum += table[bin * COLUMNS + (c + bin) % COLUMNS];
    if (sum) atomicAdd(counts + bin, sum);
  }
}

// For more bins than a block has counters: additions in memory, one for the lanes of a warp that have the
// same bin. x, counts: as above, with any number of bins.
extern "C" __global__ void __launch_bounds__(THREADS)
count_in_memory(const WEFT_T* __restrict__ x, Count* counts, index_t n, index_t bin_count, double low,
                double high, double scale) {
  const Bins bins = bins_from(bin_count, low, high, scale);
  const unsigned lane = threadIdx.x % 32;
  const index_t step = (index_t)gridDim.x * THREADS;
  // All lanes of a warp take part in each round: the vote names them.
  for (index_t start = (index_t)blockIdx.x * THREADS; start < n; start += step) {
    const index_t i = start + threadIdx.x;
    const int bin = i < n ? bin_of(x[i], bins) : NONE;
    const unsigned peers = __match_any_sync(ALL, bin);
    if (bin != NONE && lane == __ffs(peers) - 1) atomicAdd(counts + bin, (Count)__popc(peers));
  }
}
