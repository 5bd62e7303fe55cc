// Rotary embedding: each pair (a, b) of a head's elements becomes (a c - b s, b c + a s).
//
// A thread has N elements of the first half of a row and N of the second (INTERLEAVED: 2N adjacent ones), of
// HEADS heads at one position. It reads cosines and sines once for all of these heads, and loads all rows
// before it rotates the first: 2 HEADS loads of 16 bytes are in flight. Arithmetic is in float, with one
// rounding at the end. Bytes: x read, y written, the tables once for HEADS heads.
#include "numeric.cuh"

#ifndef VEC_WIDTH
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
constexpr int THREADS = 128, HEADS = 4;
// Elements of each half: an access of each, or one access that holds both.
constexpr int N = INTERLEAVED && VEC_WIDTH > 1 ? VEC_WIDTH / 2 : VEC_WIDTH;
constexpr int BYTES = VEC_WIDTH * sizeof(WEFT_T), WORDS = BYTES < 4 ? 1 : BYTES / 4;
constexpr int ACCESSES = 2 * N / VEC_WIDTH;
constexpr int F = N < 4 ? N : 4;  // of the tables, which are 16-byte aligned, at a time
using Floats = Vector<float, F>;
template <int BYTES> struct Word { using type = unsigned; };
template <> struct Word<2> { using type = unsigned short; };
struct alignas(BYTES) Pack {
  Word<BYTES>::type word[WORDS];
};

// Return the offset in a row of a thread's access number k; `i` is its first element of a half.
__device__ __forceinline__ index_t begin(int k, index_t i, index_t half) {
  return INTERLEAVED ? 2 * i + k * VEC_WIDTH : k * half + i;
}

// x: (all_heads / heads, heads, length, 2 half) by strides, with adjacent elements; cos, sin: (length, half)
// float; y: as x, contiguous; sign: 1, or -1 for the backward, which rotates by the negative angles. Blocks
// of one group of HEADS heads are adjacent in the grid.
extern "C" __global__ void __launch_bounds__(THREADS)
rope_turn(const WEFT_T* __restrict__ x, const float* __restrict__ cos,
          const float* __restrict__ sin, WEFT_T* __restrict__ y, index_t all_heads, index_t heads,
          index_t length, index_t half, index_t batch_stride, index_t head_stride, index_t stride,
          index_t sign) {
  const index_t each = half / N, items = length * each;
  const index_t blocks = (items + THREADS - 1) / THREADS;
  const index_t item = blockIdx.x % blocks * THREADS + threadIdx.x;
  const index_t first = blockIdx.x / blocks * HEADS;
  if (item >= items) return;
  const index_t t = item / each, i = item % each * N;
  Pack in[HEADS][ACCESSES];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    // Past the last head the last one is read again: a load without a branch. It is not written.
    const index_t head = min(first + h, all_heads - 1);
    const WEFT_T* row = x + head / heads * batch_stride + head % heads * head_stride + t * stride;
#pragma unroll
    for (int k = 0; k < ACCESSES; ++k)
      in[h][k] = *reinterpret_cast<const Pack*>(row + begin(k, i, half));
  }
  float c[N], s[N];
#pragma unroll
  for (int j = 0; j < N; j += F) {
    const Floats fc = *reinterpret_cast<const Floats*>(cos + t * half + i + j);
    const Floats fs = *reinterpret_cast<const Floats*>(sin + t * half + i + j);
#pragma unroll
    for (int e = 0; e < F; ++e) c[j + e] = fc.at[e], s[j + e] = fs.at[e] * (float)sign;
  }
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (first + h >= all_heads) break;
    WEFT_T elements[2 * N], rotated[2 * N];
    memcpy(elements, in[h], sizeof(elements));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int p = INTERLEAVED ? 2 * j : j, q = INTERLEAVED ? 2 * j + 1 : N + j;
      const float a = to_float(elements[p]), b = to_float(elements[q]);
      // The compiler could fuse either product with the sum, and not the same one for each VEC_WIDTH: written
      // out, the bits of an element do not depend on the address of its row.
      rotated[p] = from_float<WEFT_T>(fmaf(a, c[j], -__fmul_rn(b, s[j])));
      rotated[q] = from_float<WEFT_T>(fmaf(b, c[j], __fmul_rn(a, s[j])));
    }
    Pack out[ACCESSES];
    memcpy(out, rotated, sizeof(rotated));
#pragma unroll
    for (int k = 0; k < ACCESSES; ++k)
      *reinterpret_cast<Pack*>(y + ((first + h) * length + t) * 2 * half + begin(k, i, half)) =
          out[k];
  }
}
