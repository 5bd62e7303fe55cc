// Philox 4x32-10 and what dropout makes of it: the words of philox.py, bit for bit.
//
// A block of four words belongs to four neighbouring elements in row-major order. Source: Salmon,
// Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once
#include "numeric.cuh"

struct Words { unsigned at[4]; };

// The four words of block `counter` under the key `seed`.
__device__ __forceinline__ Words philox(unsigned long long seed, unsigned long long counter) {
  unsigned a = (unsigned)counter, b = (unsigned)(counter >> 32), c = 0, d = 0;
  unsigned low = (unsigned)seed, high = (unsigned)(seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const unsigned long long first = 0xD2511F53ull * a, second = 0xCD9E8D57ull * c;
    a = (unsigned)(second >> 32) ^ b ^ low;
    b = (unsigned)second;
    c = (unsigned)(first >> 32) ^ d ^ high;
    d = (unsigned)first;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// What dropout makes of elements: kept where the word is at least `threshold`, and scaled.
struct Dropout {
  unsigned long long seed;
  unsigned threshold;
  float scale;

  // N neighbours from element `first`, a multiple of 4; N is one, too.
  template <int N>
  __device__ __forceinline__ void apply(float (&v)[N], index_t first) const {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      const Words words = philox(seed, (unsigned long long)(first + j) / 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) v[j + k] = words.at[k] >= threshold ? v[j + k] * scale : 0.0f;
    }
  }

  // One element anywhere.
  __device__ __forceinline__ float apply(float v, index_t at) const {
    const Words words = philox(seed, (unsigned long long)at / 4);
    const int k = (int)(at % 4);
    const unsigned word =
        k < 2 ? (k == 0 ? words.at[0] : words.at[1]) : (k == 2 ? words.at[2] : words.at[3]);
    return word >= threshold ? v * scale : 0.0f;
  }
};
