// What dropout keeps: the 16-bit numbers of philox_dropout.py, a block of words for eight elements.
#pragma once
#include "numeric.cuh"
#include "philox.cuh"

// Which halves of a word are at least those of `least`.
struct Both { bool low, high; };

// Whether T's elements may lie in halves of registers while words are compared: ptxas (CUDA 13.0)
// gives the 32-bit maximum of the instruction below, which nobody reads, a register whose upper
// half still holds a __half: an H200 answered NaN. bfloat16's elements are words (numeric.cuh).
// What is compiled is looked at by tests/test_dropout_registers.py.
template <typename T> constexpr bool HALVES = false;
template <> constexpr bool HALVES<__half> = true;

template <typename T> __device__ __forceinline__ Both at_least(unsigned word, unsigned least) {
#if __CUDA_ARCH__ >= 900
  if constexpr (!HALVES<T>) {
    Both kept;
    __vibmax_u16x2(word, least, &kept.high, &kept.low);  // one instruction
    return kept;
  }
#endif
  return {word << 16 >= least << 16, word >= (least & 0xffff0000u)};
}

// Elements are kept where their number is at least the threshold, and scaled. `rule`, which the
// host makes (philox_dropout.py), has the threshold twice in its low word, the scale in its high.
struct Dropout {
  unsigned long long seed;
  unsigned least;
  float scale;

  __device__ __forceinline__ Dropout(index_t seed, index_t rule)
      : seed((unsigned long long)seed), least((unsigned)rule),
        scale(__int_as_float((int)(rule >> 32))) {}

  // Rounded by itself: no sum that follows takes the product in.
  __device__ __forceinline__ float of(float v, bool kept) const {
    const float scaled = __fmul_rn(v, scale);
    return kept ? scaled : 0.0f;
  }

  // M neighbours (1, 2, 4 or 8) from element `first` on, a multiple of M.
  template <int M>
  __device__ __forceinline__ void apply(float (&v)[M], index_t first) const {
    static_assert(M == 1 || M == 2 || M == 4 || M == 8, "");
    const Words words = philox(seed, (unsigned long long)first / 8);
    const int place = (int)(first % 8);
    if constexpr (M == 1) {
      const Both kept = at_least<WEFT_T>(words.of(place / 2), least);
      v[0] = of(v[0], place % 2 ? kept.high : kept.low);
    } else {
#pragma unroll
      for (int k = 0; k < M / 2; ++k) {
        const unsigned word = M == 8   ? words.at[k]
                              : M == 4 ? (place ? words.at[2 + k] : words.at[k])
                                       : words.of(place / 2);
        const Both kept = at_least<WEFT_T>(word, least);
        v[2 * k] = of(v[2 * k], kept.low);
        v[2 * k + 1] = of(v[2 * k + 1], kept.high);
      }
    }
  }
};
