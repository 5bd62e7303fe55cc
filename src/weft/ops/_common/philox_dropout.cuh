// Dropout by the 16-bit numbers of philox_dropout.py: one block of Philox words for eight elements.
#pragma once
#include "numeric.cuh"
#include "philox.cuh"

// For each 16-bit half of a word: true if it is at least the threshold.
struct HalfMask { bool low, high; };

// True if elements of type T may share registers with 16-bit halves while words are compared. ptxas (CUDA
// 13.0) gives the unused 32-bit result of __vibmax_u16x2 a register whose upper half still holds a __half: an
// H200 returned NaN. bfloat16 elements are read as words (numeric.cuh) and are not affected.
// tests/ops/test_dropout_registers.py examines the compiled code.
template <typename T> constexpr bool HALVES = false;
template <> constexpr bool HALVES<__half> = true;

// `threshold` has the 16-bit threshold in both halves.
template <typename T> __device__ __forceinline__ HalfMask at_least(unsigned word, unsigned threshold) {
#if __CUDA_ARCH__ >= 900
  if constexpr (!HALVES<T>) {
    HalfMask keep;
    __vibmax_u16x2(word, threshold, &keep.high, &keep.low);  // both comparisons in one instruction
    return keep;
  }
#endif
  return {word << 16 >= threshold << 16, word >= (threshold & 0xffff0000u)};
}

// Keeps and scales an element whose number is at least the threshold, and zeroes the others. The host packs
// `rule` (pack_threshold_and_scale in philox_dropout.py): the threshold twice in the low word, the bits of
// the float scale in the high word.
struct Dropout {
  unsigned long long seed;
  unsigned threshold;
  float scale;

  __device__ __forceinline__ Dropout(index_t seed, index_t rule)
      : seed((unsigned long long)seed), threshold((unsigned)rule),
        scale(__int_as_float((int)(rule >> 32))) {}

  // The product is rounded on its own: the compiler must not fuse it with an addition that follows, since
  // the result has to equal the reference bit for bit.
  __device__ __forceinline__ float apply_mask(float v, bool keep) const {
    const float scaled = __fmul_rn(v, scale);
    return keep ? scaled : 0.0f;
  }

  // Applies dropout to M adjacent elements (1, 2, 4 or 8) from index `first` on, a multiple of M. All of them
  // lie in one block of eight, so that one call of Philox suffices.
  template <int M>
  __device__ __forceinline__ void apply(float (&v)[M], index_t first) const {
    static_assert(M == 1 || M == 2 || M == 4 || M == 8, "");
    const Words words = philox(seed, (unsigned long long)first / 8);
    // Unaligned kernels (M = 1) compute a whole block for each element: slower, but the same bits.
    const int position = (int)(first % 8);
    if constexpr (M == 1) {
      const HalfMask keep = at_least<WEFT_T>(words.of(position / 2), threshold);
      v[0] = apply_mask(v[0], position % 2 ? keep.high : keep.low);
    } else {
#pragma unroll
      for (int k = 0; k < M / 2; ++k) {
        const unsigned word = M == 8   ? words.at[k]
                              : M == 4 ? (position ? words.at[2 + k] : words.at[k])
                                       : words.of(position / 2);
        const HalfMask keep = at_least<WEFT_T>(word, threshold);
        v[2 * k] = apply_mask(v[2 * k], keep.low);
        v[2 * k + 1] = apply_mask(v[2 * k + 1], keep.high);
      }
    }
  }
};
