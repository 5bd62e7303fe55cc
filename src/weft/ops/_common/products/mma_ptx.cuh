// Wrappers of the PTX instructions of the products by mma.sync, one each: loads and stores of shared memory,
// and the product itself. Addresses are byte addresses in shared memory.
//
// All inline assembly of these products is in this file, async_copy.cuh and ldmatrix.cuh, so that the CPU
// emulator of the tests can replace it.
#ifndef WEFT_MMA_PTX
#define WEFT_MMA_PTX
#include "async_copy.cuh"
#include "ldmatrix.cuh"
#include "numeric.cuh"

template <typename U> constexpr bool is_bfloat16 = false;
template <> constexpr bool is_bfloat16<__nv_bfloat16> = true;

// Stores an element of 2 or 4 bytes.
template <typename V> __device__ __forceinline__ void shared_store(unsigned at, V v) {
  if constexpr (sizeof(V) == 2)
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(*reinterpret_cast<const short*>(&v)) : "memory");
  else
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(*reinterpret_cast<const float*>(&v)) : "memory");
}

__device__ __forceinline__ unsigned shared_word(unsigned at) {
  unsigned v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

// c (16 x 8) += a b over 32 bytes of K: 16 half types, or 8 float32 truncated to tf32.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define WEFT_MMA(SHAPE, TYPE)                                                                \
  asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "               \
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"             \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (sizeof(T) == 4) WEFT_MMA("m16n8k8", "tf32");
  else if constexpr (is_bfloat16<T>) WEFT_MMA("m16n8k16", "bf16");
  else WEFT_MMA("m16n8k16", "f16");
#undef WEFT_MMA
}

#endif
