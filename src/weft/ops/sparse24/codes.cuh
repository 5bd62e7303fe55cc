// Elements and codes of the 2:4 format (pattern.py). Elements are seen as integers of their size: magnitudes
// are compared by their bits, and nothing is rounded.
//
// ELEMENT is the integer, INFINITY_BITS those of infinity; the bits of NaN are larger.
#pragma once

typedef long long index_t;  // every size and index: tensors may have more than 2^31 elements

#ifndef ELEMENT
#define ELEMENT unsigned short
#define INFINITY_BITS 0x7f80
#endif
#ifndef WIDE
#define WIDE 0  // rows are whole words of metadata, at multiples of 16 bytes
#endif

namespace {

using Element = ELEMENT;
constexpr int GROUP = 4, WORD_COLUMNS = 16;  // columns of one row in a word
constexpr int KEPT_COLUMNS = WORD_COLUMNS / 2;
constexpr unsigned FILLER = 0x4;  // the code beyond the matrix names the first two places

#ifndef WEFT_STORE_16  // which an emulator defines
// Stores 16 bytes at once: the compiler may split the store of a structure whose elements it computes one by
// one.
__device__ __forceinline__ void store_16(void* to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
#endif

template <int COUNT> struct alignas(COUNT * sizeof(Element)) Vec { Element at[COUNT]; };
constexpr int VECTOR = 16 / sizeof(Element);

// Returns the magnitude as an integer that is larger for larger ones: all NaN are alike, above infinity.
__device__ __forceinline__ int magnitude(Element e) {
  constexpr unsigned mask = ~0u >> (33 - 8 * sizeof(Element));
  const unsigned bits = e & mask;
  return (int)(bits > INFINITY_BITS ? INFINITY_BITS + 1 : bits);
}

__device__ __forceinline__ Element pick(Element a, Element b, Element c, Element d, unsigned place) {
  const Element low = place & 1 ? b : a, high = place & 1 ? d : c;
  return place & 2 ? high : low;
}

// COUNT elements from `from` on, of which those before `end` exist (in fours); the others are 0.
template <int COUNT>
__device__ __forceinline__ void load(Element (&to)[COUNT], const Element* from, index_t count) {
  if constexpr (WIDE && COUNT % VECTOR == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += VECTOR) {
      Vec<VECTOR> v = {};
      if (i < count) v = *reinterpret_cast<const Vec<VECTOR>*>(from + i);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) to[i + j] = v.at[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = i < count ? from[i] : (Element)0;
  }
}

// The same in words, of two elements in 16-bit types: as elements, each would take a register of its own.
template <int WORDS>
__device__ __forceinline__ void load_words(unsigned (&to)[WORDS], const Element* from, index_t count) {
  constexpr int EACH = 4 / sizeof(Element);
  if constexpr (WIDE) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (i * EACH < count) v = *reinterpret_cast<const uint4*>(from + i * EACH);
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else {
    Element elements[WORDS * EACH];
    load(elements, from, count);
    memcpy(to, elements, sizeof(to));
  }
}

// Stores the elements before `count`, in fours or twos.
template <int COUNT>
__device__ __forceinline__ void store(Element* to, const Element (&from)[COUNT], index_t count) {
  if constexpr (WIDE && COUNT % VECTOR == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += VECTOR) {
      uint4 v;
      memcpy(&v, from + i, sizeof(v));
      if (i < count) store_16(to + i, v);
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (i < count) to[i] = from[i];
  }
}

}  // namespace
