// Stores of a vector as one access.
//
// By an assignment NVRTC 13.0 stores the elements of a structure one by one where it has computed them one by
// one: a warp's accesses are then N strided ones, and a cumulative sum of 2^28 bfloat16 elements took 1.0 ms
// on an H200 where it takes 0.3 ms (results: primitives-2026-11-26.txt).
#pragma once
#include "numeric.cuh"

// `to` is aligned to the vector's size. An emulator on the CPU assigns.
template <typename T, int N>
__device__ __forceinline__ void store_pack(T* to, const Vector<T, N>& pack) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(pack) == 16) {
    uint4 words;
    memcpy(&words, &pack, sizeof(words));
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
    return;
  }
  if constexpr (sizeof(pack) == 8) {
    uint2 words;
    memcpy(&words, &pack, sizeof(words));
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(to), "r"(words.x), "r"(words.y) : "memory");
    return;
  }
#endif
  *reinterpret_cast<Vector<T, N>*>(to) = pack;
}
