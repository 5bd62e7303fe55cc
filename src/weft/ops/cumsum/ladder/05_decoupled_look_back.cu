// Step 5: one launch; a tile looks back at the tiles before it (Merrill and Garland, NVR-2016-002).
//
// A tile publishes its own sum at once, and its prefix (the sum of the row up to its end) as soon as it has
// it. A warp looks back 32 tiles at a time, adds the sums that it finds, and stops at the nearest prefix. How
// far it looks depends on the other blocks' progress, and so do the order of the additions and the last bits.
// Bytes: n read, n written, 8 for each tile.
#include "published_word.cuh"
#include "block_scan.cuh"
#include "reduce.cuh"

constexpr unsigned OWN = 1, PREFIX = 2;  // flags of a word: the tile's sum, or the row's up to its end

// Returns the sum of the tiles before `tile`, in every lane of a warp.
__device__ __forceinline__ float look_back(const Word* words, index_t tile) {
  const int lane = threadIdx.x % 32;
  float before = 0.0f;
  for (index_t end = tile; end > 0; end -= 32) {
    // Lane 0 has the nearest tile. Lanes before the row's start have an empty prefix.
    const index_t other = end - 1 - lane;
    const Word word = other >= 0 ? wait_for_word(words + other) : (Word)PREFIX << 32;
    const unsigned prefixes = __ballot_sync(ALL, flag_of(word) == PREFIX);
    const int nearest = prefixes ? __ffs(prefixes) - 1 : 31;
    before += warp_sum(lane <= nearest ? sum_of(word) : 0.0f);
    if (prefixes) break;
  }
  return before;
}

// x: (rows, columns), rows at x_stride elements; y: (rows, columns) contiguous; words: a counter, then
// (rows, tiles), all 0 before the launch.
extern "C" __global__ void __launch_bounds__(THREADS)
look_back_scan(const WEFT_T* x, WEFT_T* y, Word* words, index_t columns, index_t x_stride, index_t tiles) {
  __shared__ index_t ticket[1];
  __shared__ float totals[WARPS];
  __shared__ float prefix[1];
  // Tiles are taken in the order in which blocks start: a tile never waits for one whose block cannot start.
  if (threadIdx.x == 0) ticket[0] = (index_t)atomicAdd(words, 1ull);
  __syncthreads();
  const index_t row = ticket[0] / tiles, tile = ticket[0] % tiles;
  float v[ITEMS];
  load_items(v, x + row * x_stride, tile, columns);
  const float sum = scan_block(v, totals);
  if (threadIdx.x < 32) {
    Word* row_words = words + 1 + row * tiles;
    if (threadIdx.x == 0) publish(row_words + tile, OWN, sum);
    const float before = look_back(row_words, tile);
    if (threadIdx.x == 0) {
      publish(row_words + tile, PREFIX, before + sum);
      prefix[0] = before;
    }
  }
  __syncthreads();
  store_items(v, prefix[0], y + row * columns, tile, columns);
}
