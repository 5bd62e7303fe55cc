// A row that begins at any element, moved 16 bytes at a time: a head of single elements, a body of vectors
// of N elements, and a tail of single elements. Head and tail together are the edges of the row.
//
// PEEL 0: every row is a whole number of aligned vectors, and there are no edges.
// PEEL 1: in all tensors a row begins equally far behind a multiple of 16 bytes.
// PEEL 2: it begins anywhere in each tensor. Vectors are aligned in the output; a vector of an input is cut
//         out of two aligned ones (Body). Such a load reaches up to N - 1 elements past both ends of its
//         vector, so that head and tail have at least N elements: no load leaves the row.
//
// Included after WEFT_T and N. With PEEL a vector has 16 bytes.
#pragma once

#ifndef PEEL
#define PEEL 0
#endif
#ifndef PEEL_MARGIN
#define PEEL_MARGIN (PEEL == 2 ? N : 0)  // the fewest elements of a head and of a tail
#endif
static_assert(PEEL == 0 || N * sizeof(WEFT_T) == 16, "a row with edges is moved 16 bytes at a time");

constexpr int MOST_EDGES = PEEL ? 2 * (N - 1 + PEEL_MARGIN) : 0;

struct RowView {
  int head, vecs, edges;  // elements before the body, vectors of the body, elements of head and tail

  __device__ __forceinline__ RowView(const WEFT_T* out, int columns) {
    head = edges = 0;
    vecs = columns / N;
    if (!PEEL) return;
    const int past = (int)((unsigned long long)out % 16 / sizeof(WEFT_T));
    const int before = (N - past) % N + PEEL_MARGIN;
    vecs = max(0, (columns - before - PEEL_MARGIN) / N);
    head = min(before, columns);
    edges = columns - vecs * N;
  }
  // The column of edge `edge`, 0 to edges - 1. Without a body the two cases agree.
  __device__ __forceinline__ int edge_column(int edge) const {
    return edge < head ? edge : edge + vecs * N;
  }
};

// The V that begins `past` bytes after the start of `blocks`. Its last bytes are in block number `last`,
// which is read for nothing where `past` is 0. Loads of 16 bytes, whatever the elements are. The words are
// selected with constant indices: an index known only at run time would move them to local memory.
template <typename V>
__device__ __forceinline__ V joined(const uint4* blocks, int last, int past) {
  constexpr int BLOCKS = sizeof(V) / 16, WORDS = 4 * BLOCKS;
  static_assert(sizeof(V) == 16 * BLOCKS, "a shifted vector has a multiple of 16 bytes");
  unsigned word[WORDS + 4];
#pragma unroll
  for (int k = 0; k <= BLOCKS; ++k) {
    const uint4 block = blocks[k < BLOCKS ? k : last];
    word[4 * k] = block.x, word[4 * k + 1] = block.y;
    word[4 * k + 2] = block.z, word[4 * k + 3] = block.w;
  }
  // Each word passes through an empty asm: otherwise the compiler turns the choice between two words into a
  // choice between two loads, and loads four bytes at a time.
#pragma unroll
  for (int k = 0; k < WORDS + 4; ++k) asm("" : "+r"(word[k]));
#pragma unroll
  for (int k = 0; k < WORDS + 2; ++k) word[k] = past & 8 ? word[k + 2] : word[k];
#pragma unroll
  for (int k = 0; k < WORDS + 1; ++k) word[k] = past & 4 ? word[k + 1] : word[k];
#pragma unroll
  for (int k = 0; k < WORDS; ++k) word[k] = __funnelshift_r(word[k], word[k + 1], past % 4 * 8);
  V v;
  memcpy(&v, word, sizeof(V));
  return v;
}

// The body of a row in one tensor. SHIFTED: it begins at any element; otherwise at a multiple of a vector.
template <typename V, bool SHIFTED = PEEL == 2> struct Body {
  const V* base;  // the last aligned vector that begins no later than the body
  int past;       // the bytes from there to the body

  __device__ __forceinline__ explicit Body(const void* first)
      : past(SHIFTED ? (int)((unsigned long long)first % 16) : 0) {
    base = reinterpret_cast<const V*>(static_cast<const char*>(first) - past);
  }
  __device__ __forceinline__ Body(const V* base_, int past_) : base(base_), past(past_) {}
  __device__ __forceinline__ V operator[](int i) const {
    if constexpr (SHIFTED) return joined<V>(reinterpret_cast<const uint4*>(base) + i, 1, past);
    return base[i];
  }
};

// The 16 bytes from `from` on, of which those past `end` are 0.
__device__ __forceinline__ uint4 last_block(const WEFT_T* from, const WEFT_T* end) {
  constexpr int COUNT = 16 / sizeof(WEFT_T);
  Vector<WEFT_T, COUNT> v;
#pragma unroll
  for (int j = 0; j < COUNT; ++j) v.at[j] = from + j < end ? from[j] : from_float<WEFT_T>(0.0f);
  uint4 words;
  memcpy(&words, &v, sizeof(v));
  return words;
}

// The end of `row` if nothing of the tensor need follow it: it is the last row, or rows overlap. Otherwise
// null.
__device__ __forceinline__ const WEFT_T* end_of_last(const WEFT_T* tensor, index_t row, index_t rows,
                                                     index_t columns, index_t stride) {
  const bool is_last = PEEL == 2 && (row == rows - 1 || stride < columns);
  return is_last ? tensor + row * stride + columns : nullptr;
}

// COUNT vectors of a row's body, STEP apart, as they are loaded: aligned blocks of 16 bytes, two for a vector
// that begins between them (PEEL 2). With PEEL_MARGIN 0 the blocks of the first and the last vector reach
// into the neighbouring rows and, before the tensor, into the 16 bytes in which it begins.
template <int COUNT, int STEP> struct BodyBlocks {
  static constexpr int BLOCKS = PEEL == 2 ? 2 : 1;
  uint4 blocks[COUNT][BLOCKS];

  // `end`: of the tensor, past which nothing is read, if this is its last row; otherwise null.
  __device__ __forceinline__ void load(const WEFT_T* start, int vecs, int first, const WEFT_T* end) {
    const Body<uint4> body(start);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int at = first + i * STEP;
      blocks[i][0] = blocks[i][BLOCKS - 1] = {0, 0, 0, 0};
      if (at < vecs) blocks[i][0] = body.base[at];
      // Without `past`, nothing of a vector is in its second block, which need not exist.
      if (BLOCKS == 2 && at < vecs && body.past && !end) blocks[i][BLOCKS - 1] = body.base[at + 1];
    }
    if (BLOCKS == 1 || !end || !body.past) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int at = first + i * STEP;
      if (at < vecs)
        blocks[i][BLOCKS - 1] = last_block(reinterpret_cast<const WEFT_T*>(body.base + at + 1), end);
    }
  }
  // Vector i, or zeros if the row has none. `past`: bytes from the start of its first block to the vector.
  __device__ __forceinline__ Vector<WEFT_T, N> cut(int i, int past) const {
    static_assert(N * sizeof(WEFT_T) == 16, "a vector has 16 bytes");
    if constexpr (BLOCKS == 2) return joined<Vector<WEFT_T, N>>(blocks[i], 1, past);
    Vector<WEFT_T, N> v;
    memcpy(&v, blocks[i], sizeof(v));
    return v;
  }
};

// The edges of a row that one of STEP threads has, as floats: number `first` and every STEP-th after it.
template <int STEP> struct Edges {
  static constexpr int COUNT = (MOST_EDGES + STEP - 1) / STEP;
  float at[COUNT ? COUNT : 1];

  // Edges that the row does not have are `fill`.
  __device__ __forceinline__ void load(const WEFT_T* row, const RowView& view, int first, float fill) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int edge = first + k * STEP;
      at[k] = edge < view.edges ? to_float(row[view.edge_column(edge)]) : fill;
    }
  }
  // Writes value(k) as this thread's edge k.
  template <typename Value>
  __device__ __forceinline__ void store(WEFT_T* row, const RowView& view, int first, Value value) const {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int edge = first + k * STEP;
      if (edge < view.edges) row[view.edge_column(edge)] = from_float<WEFT_T>(value(k));
    }
  }
};
