// Asynchronous copies from global to shared memory (cp.async, from sm_80 on), one or two instructions each.
//
// The guard is a name that the CPU emulator of the tests defines, since it replaces this file.
#ifndef WEFT_ASYNC_COPY
#define WEFT_ASYNC_COPY
#include "numeric.cuh"

// Return the byte address of `p` in shared memory.
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copy `valid` bytes (0 to SIZE) and fill the rest of SIZE bytes with 0. Both addresses are aligned to SIZE.
// With 0 valid bytes nothing is read.
template <int SIZE = 16>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, int valid) {
  // .cg bypasses the L1 and exists for 16 bytes only; smaller copies go through the L1 (.ca).
  if constexpr (SIZE == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
}

__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most PENDING of this thread's committed groups are still in flight.
template <int PENDING> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif
