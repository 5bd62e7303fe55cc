// Device code of all softmax kernels: vectors of VEC_WIDTH elements, and the statistics of a row.
//
// The statistics of a row are (top, total): its maximum and the sum of exp(x - top). The maximum is at least
// LEAST, the least finite float, since -inf - -inf would be NaN. A row of -inf alone ends with a total of 0
// and gives 0 * (1/0) = NaN, as torch does. fmaxf drops a NaN, but its exponential is NaN again: it reaches
// the total, and with it every output of its row.
#pragma once
#include "numeric.cuh"
#include "reduce.cuh"

#ifndef VEC_WIDTH
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#endif
#ifndef THREADS
#define THREADS 256
#endif

// A vector as it is loaded: N elements in WORDS words of E elements each; a word has 4 bytes (2 if the whole
// vector has). Rows stay in registers in this form: 16-bit elements take half the registers of floats.
constexpr int N = VEC_WIDTH;  // a power of two, 16 bytes at most
constexpr int BYTES = N * sizeof(WEFT_T);
constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
constexpr int E = N / WORDS;
template <int BYTES> struct Word { using type = unsigned; };
template <> struct Word<2> { using type = unsigned short; };
struct alignas(BYTES) Pack {
  Word<BYTES>::type word[WORDS];
};
#include "row_view.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST = -3.4028234663852886e38f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Returns exp(a - b) by exp2 of the special function unit (2 ulp). The subtraction comes first, since
// b * LOG2E may overflow although a - b is small.
__device__ __forceinline__ float exp_of_difference(float a, float b) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"((a - b) * LOG2E));
  return e;
}

template <typename T> __device__ __forceinline__ float decode(unsigned word, int high);
template <> __device__ __forceinline__ float decode<float>(unsigned word, int high) {
  return __uint_as_float(word);
}
// A bfloat16 is the upper half of a float: one shift or mask, no conversion instruction.
template <> __device__ __forceinline__ float decode<__nv_bfloat16>(unsigned word, int high) {
  return __uint_as_float(high ? word & 0xffff0000u : word << 16);
}
template <> __device__ __forceinline__ float decode<__half>(unsigned word, int high) {
  return __half2float(__ushort_as_half(high ? word >> 16 : word & 0xffffu));
}

template <typename T> __device__ __forceinline__ unsigned encode(float low, float high);
template <> __device__ __forceinline__ unsigned encode<float>(float low, float high) {
  return __float_as_uint(low);
}
template <> __device__ __forceinline__ unsigned encode<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return (unsigned)__bfloat16_as_ushort(both.y) << 16 | __bfloat16_as_ushort(both.x);
}
template <> __device__ __forceinline__ unsigned encode<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return (unsigned)__half_as_ushort(both.y) << 16 | __half_as_ushort(both.x);
}

__device__ __forceinline__ float element(const Pack& p, int j) {
  return decode<WEFT_T>(p.word[j / E], j % E);
}

// Returns the vector whose element j is value(j).
template <typename Value> __device__ __forceinline__ Pack packed(Value value) {
  Pack p;
#pragma unroll
  for (int k = 0; k < WORDS; ++k)
    p.word[k] = encode<WEFT_T>(value(k * E), E == 2 ? value(k * E + 1) : 0.0f);
  return p;
}

__device__ __forceinline__ Pack filled_pack(float v) {
  return packed([v](int) { return v; });
}

// Hides from the compiler that the words are unchanged, so that it converts them to floats again instead of
// keeping the floats alive: a conversion costs one instruction, a live float one register.
__device__ __forceinline__ void discard_floats(Pack& p) {
#pragma unroll
  for (int k = 0; k < WORDS; ++k) {
    unsigned word = p.word[k];
    asm volatile("" : "+r"(word));
    p.word[k] = word;
  }
}

__device__ __forceinline__ float pack_max(const Pack& p) {
  float top = element(p, 0);
#pragma unroll
  for (int j = 1; j < N; ++j) top = fmaxf(top, element(p, j));
  return top;
}

__device__ __forceinline__ float pack_dot(const Pack& a, const Pack& b) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < N; ++j) sum = fmaf(element(a, j), element(b, j), sum);
  return sum;
}

struct Statistics {
  float top, total;
};

// Merges the statistics of all warps (the same in all lanes of a warp) with one barrier. Each warp merges the
// 32 entries of `scratch` (shared memory) itself. A second call needs another scratch or a barrier before it.
__device__ __forceinline__ Statistics block_merge(Statistics own, Statistics* scratch) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) scratch[threadIdx.x / 32] = own;
  __syncthreads();
  const bool has_warp = lane < blockDim.x / 32;
  const Statistics part = has_warp ? scratch[lane] : Statistics{LEAST, 0.0f};
  const float top = warp_max(part.top);
  // An empty part has the total 0 and the top LEAST: exp of the difference is finite, and the product 0.
  return {top, warp_sum(part.total * exp_of_difference(part.top, top))};
}
