// Philox 4x32-10: the words of philox.py, bit for bit.
//
// Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once
#include "numeric.cuh"

struct Words {
  unsigned at[4];

  // Word k for a k that is not known when compiling. Selects keep the words in registers; an index into the
  // array would move them to local memory.
  __device__ __forceinline__ unsigned of(int k) const {
    return k < 2 ? (k == 0 ? at[0] : at[1]) : (k == 2 ? at[2] : at[3]);
  }
};

// Both halves of a product by one instruction; the compiler makes three of a 64-bit product.
__device__ __forceinline__ void multiply(unsigned a, unsigned b, unsigned& low, unsigned& high) {
  unsigned long long product;
#ifdef __CUDACC__
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
#else  // on a CPU, where tests run kernels
  product = 1ull * a * b;
#endif
  low = (unsigned)product;
  high = (unsigned)(product >> 32);
}

// Returns the four words of block `counter` under the key `seed`.
__device__ __forceinline__ Words philox(unsigned long long seed, unsigned long long counter) {
  unsigned a = (unsigned)counter, b = (unsigned)(counter >> 32), c = 0, d = 0;
  unsigned low = (unsigned)seed, high = (unsigned)(seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    unsigned first, first_high, second, second_high;
    multiply(a, 0xD2511F53u, first, first_high);
    multiply(c, 0xCD9E8D57u, second, second_high);
    a = second_high ^ b ^ low;
    b = second;
    c = first_high ^ d ^ high;
    d = first;
    low += 0x9E3779B9u;  // the Weyl sequence of the round keys
    high += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}
