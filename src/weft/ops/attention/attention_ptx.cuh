// Wrappers of the PTX instructions that attention's CUDA kernels use, one or two instructions each.
//
// All inline assembly is here and in async_copy.cuh, so that the CPU emulator of the tests can replace it.
// Addresses are byte addresses in shared memory. Source of the fragment layouts: PTX ISA, mma.m16n8k16.
#ifndef WEFT_ATTENTION_PTX
#define WEFT_ATTENTION_PTX
#include "async_copy.cuh"
#include "ldmatrix.cuh"
#include "numeric.cuh"

template <typename U> constexpr bool is_bfloat16 = false;
template <> constexpr bool is_bfloat16<__nv_bfloat16> = true;

// Return `x`, or the thread's index, as a value that the compiler cannot trace. Addresses computed from it
// in a loop are recomputed in each iteration, so that they hold no registers between iterations.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ int opaque_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// c (16 x 8) += a (16 x 16) b (16 x 8).
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
#define WEFT_MULTIPLY(TYPE)                                                                 \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "                        \
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                     \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (is_bfloat16<T>) WEFT_MULTIPLY("bf16");
  else WEFT_MULTIPLY("f16");
#undef WEFT_MULTIPLY
}

// Round two values to T and pack them into one register, `low` in the lower half.
template <typename T> __device__ __forceinline__ unsigned pair(float low, float high) {
  unsigned packed;
  if constexpr (is_bfloat16<T>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Return 2^x: 0 for -inf, and denormal results are flushed to 0.
__device__ __forceinline__ float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ __forceinline__ void shared_store(unsigned at, unsigned v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void shared_store(unsigned at, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
__device__ __forceinline__ float shared_load(unsigned at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void shared_load(float (&v)[2], unsigned at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ void shared_load(unsigned (&v)[4], unsigned at) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at)
               : "memory");
}

#endif
