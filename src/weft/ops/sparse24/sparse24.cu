// Pruning a matrix to 2:4, expanding it again, and taking the same places of another matrix: a thread for
// each word of metadata.
//
// w (rows, columns), values (rows, columns / 2), metadata (column blocks, row_blocks, 32), see pattern.py.
// Lane l of a warp has rows l / 4 and l / 4 + 8 of a block of 16 rows, and 16 of its 64 columns: four lanes
// read 128 adjacent bytes of a row in 16-bit types. Neighbouring warps take neighbouring columns of the same
// rows.
// Bytes: 2:4 has 9/16 of those of w, which are read once and written once.
#include "codes.cuh"

namespace {

constexpr int THREADS = 256;
constexpr bool HALF = sizeof(Element) == 2;

// The word of this thread: its number in the metadata, and its first row and column. False: none is left.
struct Place { index_t word = 0, row = 0, column = 0; };
__device__ __forceinline__ bool place_of_thread(Place& place, index_t row_blocks, index_t column_blocks) {
  const index_t warp = (blockIdx.x * (index_t)THREADS + threadIdx.x) / 32;
  if (warp >= row_blocks * column_blocks) return false;
  const index_t row_block = warp / column_blocks, block = warp % column_blocks;
  const int lane = threadIdx.x % 32;
  place.word = (block * row_blocks + row_block) * 32 + lane;
  place.row = row_block * 16 + lane / 4;
  place.column = block * 64 + lane % 4 * WORD_COLUMNS;
  return true;
}

// Writes the two float32 of largest magnitude, in their order, and returns their code.
__device__ __forceinline__ unsigned prune_four(const unsigned* e, unsigned* kept) {
  int key[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) key[i] = magnitude((Element)e[i]);
  bool stays[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    int ahead = 0;  // of equal ones the lower place is ahead
#pragma unroll
    for (int j = 0; j < GROUP; ++j) ahead += j < i ? key[j] >= key[i] : j > i && key[j] > key[i];
    stays[i] = ahead < 2;
  }
  const unsigned first = stays[0] ? 0 : stays[1] ? 1 : 2;
  const unsigned second = stays[3] ? 3 : stays[2] ? 2 : 1;
  kept[0] = pick((Element)e[0], (Element)e[1], (Element)e[2], (Element)e[3], first);
  kept[1] = pick((Element)e[0], (Element)e[1], (Element)e[2], (Element)e[3], second);
  return first | second << 2;
}

// The same in 16-bit types, by a third of the instructions, which else take longer than the bytes. A key is a
// magnitude above a tag of its place, which is larger for lower places. The tags of the two largest find in a
// table which bytes of the four stay (__byte_perm), and the code.
struct Choice { unsigned selector, code; };
constexpr int TAGS = GROUP * GROUP;

__device__ __forceinline__ constexpr unsigned tag_of(int place) {
  return (GROUP - 1 - place) * sizeof(Choice);
}

// Of the pair of tags `index`, larger and smaller key; two equal tags have no meaning.
__device__ __forceinline__ Choice choice_of(int index) {
  const unsigned larger = GROUP - 1 - index / GROUP, smaller = GROUP - 1 - index % GROUP;
  const unsigned first = min(larger, smaller), second = max(larger, smaller);
  return {first * 0x22 + second * 0x2200 + 0x1010, first | second << 2};
}

__device__ __forceinline__ unsigned prune_four(unsigned low, unsigned high, unsigned& kept,
                                               const Choice* choices) {
  constexpr unsigned NAN_BITS = (INFINITY_BITS & 0xffff) + 1;  // all NaN are alike, above infinity
  const unsigned a = __vminu2(low & 0x7fff7fff, NAN_BITS * 0x10001);
  const unsigned b = __vminu2(high & 0x7fff7fff, NAN_BITS * 0x10001);
  const unsigned k0 = (a << 16) + tag_of(0), k1 = (a & 0xffff0000) | tag_of(1);
  const unsigned k2 = (b << 16) + tag_of(2), k3 = (b & 0xffff0000) | tag_of(3);
  const unsigned larger = max(k0, k1), smaller = min(k0, k1), other = max(k2, k3), last = min(k2, k3);
  const unsigned first = max(larger, other);
  const unsigned second = max(max(smaller, last), min(larger, other));
  constexpr unsigned TAG = tag_of(0);  // its bits are those of all tags
  const unsigned at = (first & TAG) * GROUP + (second & TAG);
  const Choice choice = *reinterpret_cast<const Choice*>(reinterpret_cast<const char*>(choices) + at);
  kept = __byte_perm(low, high, choice.selector);
  return choice.code;
}

}  // namespace

// stride: elements from a row of w to the next.
extern "C" __global__ void __launch_bounds__(THREADS)
prune_words(const Element* __restrict__ w, Element* __restrict__ values, unsigned* __restrict__ metadata,
            index_t rows, index_t columns, index_t stride, index_t row_blocks, index_t column_blocks) {
  __shared__ Choice choices[TAGS];
  if constexpr (HALF) {
    if (threadIdx.x < TAGS) choices[threadIdx.x] = choice_of(threadIdx.x);
  }
  Place place;
  const bool exists = place_of_thread(place, row_blocks, column_blocks);
  const index_t left = columns - place.column;  // columns of this word that exist, if positive
  constexpr int WORDS = HALF ? WORD_COLUMNS / 2 : WORD_COLUMNS, GROUP_WORDS = WORDS * GROUP / WORD_COLUMNS;
  unsigned e[2][WORDS];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const index_t row = place.row + half * 8;
    load_words(e[half], w + row * stride + place.column, exists && row < rows ? left : 0);
  }
  if constexpr (HALF) __syncthreads();  // the table is written, while elements are on their way
  if (!exists) return;
  unsigned word = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const index_t row = place.row + half * 8;
    unsigned kept[WORDS / 2];
#pragma unroll
    for (int n = 0; n < WORD_COLUMNS / GROUP; ++n) {
      // Beyond the end all four are 0, whose code is the filler: the first two of equal ones stay.
      const unsigned* four = e[half] + n * GROUP_WORDS;
      unsigned code;
      if constexpr (HALF) code = prune_four(four[0], four[1], kept[n], choices);
      else code = prune_four(four, kept + n * 2);
      word |= code << (half * 16 + n * 4);
    }
    Element elements[KEPT_COLUMNS];
    memcpy(elements, kept, sizeof(elements));
    store(values + row * (columns / 2) + place.column / 2, elements, row < rows ? left / 2 : 0);
  }
  metadata[place.word] = word;
}

// stride: elements from a row of values to the next. w is contiguous. Without the hint of four blocks an SM
// the compiler spills on sm_100 where rows are no vectors.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
expand_words(const Element* __restrict__ values, const unsigned* __restrict__ metadata,
             Element* __restrict__ w, index_t rows, index_t columns, index_t stride, index_t row_blocks,
             index_t column_blocks) {
  Place place;
  if (!place_of_thread(place, row_blocks, column_blocks)) return;
  const index_t left = columns - place.column;
  const unsigned word = metadata[place.word];
  Element kept[2][KEPT_COLUMNS];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const index_t row = place.row + half * 8;
    load(kept[half], values + row * stride + place.column / 2, row < rows ? left / 2 : 0);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const index_t row = place.row + half * 8;
    Element e[WORD_COLUMNS];
#pragma unroll
    for (int i = 0; i < WORD_COLUMNS; ++i) {
      const unsigned code = word >> (half * 16 + i / GROUP * 4) & 15, here = i % GROUP;
      const Element* two = kept[half] + i / GROUP * 2;
      e[i] = (code & 3) == here ? two[0] : code >> 2 == here ? two[1] : (Element)0;
    }
    store(w + row * columns + place.column, e, row < rows ? left : 0);
  }
}

// Takes the elements of w (rows, columns) that the metadata names, as values. stride: of a row of w.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
compress_words(const Element* __restrict__ w, const unsigned* __restrict__ metadata,
               Element* __restrict__ values, index_t rows, index_t columns, index_t stride,
               index_t row_blocks, index_t column_blocks) {
  Place place;
  if (!place_of_thread(place, row_blocks, column_blocks)) return;
  const index_t left = columns - place.column;
  const unsigned word = metadata[place.word];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const index_t row = place.row + half * 8;
    Element e[WORD_COLUMNS], kept[KEPT_COLUMNS];
    load(e, w + row * stride + place.column, row < rows ? left : 0);
#pragma unroll
    for (int i = 0; i < KEPT_COLUMNS; ++i) {
      const Element* four = e + i / 2 * GROUP;
      kept[i] = pick(four[0], four[1], four[2], four[3], word >> (half * 16 + i * 2) & 3);
    }
    store(values + row * (columns / 2) + place.column / 2, kept, row < rows ? left / 2 : 0);
  }
}
