// Words by which blocks of one launch pass float sums to each other: a flag in the upper half, the sum's bits
// in the lower one.
//
// Flag and sum are one 8-byte word, which is loaded and stored whole. A block that sees the flag has the sum
// too, so that no fence orders one before the other, and relaxed accesses suffice. They are of GPU scope: a
// plain load could be served by this SM's L1, where the word would stay 0 for ever.
#pragma once
typedef unsigned long long Word;

// An emulator defines both accesses itself.
#ifndef WEFT_PUBLISHED_WORD
__device__ __forceinline__ void store_word(Word* to, Word word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ Word load_word(const Word* from) {
  Word word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
#endif

// A word of 0 is one that no block has written.
__device__ __forceinline__ void publish(Word* to, unsigned flag, float sum) {
  store_word(to, (Word)flag << 32 | __float_as_uint(sum));
}
__device__ __forceinline__ Word wait_for_word(const Word* from) {
  Word word;
  do word = load_word(from);
  while (word == 0);
  return word;
}
__device__ __forceinline__ unsigned flag_of(Word word) { return (unsigned)(word >> 32); }
__device__ __forceinline__ float sum_of(Word word) { return __uint_as_float((unsigned)word); }
