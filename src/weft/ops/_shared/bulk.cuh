// The bulk copy engine (compute capability 9.0 and later): one thread asks for many bytes, and an
// mbarrier tells when they have come.
#pragma once

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned address(const void* shared) {
  return (unsigned)__cvta_generic_to_shared(shared);
}

// `count` barriers. One arrival and the bytes that it announces complete a barrier's phase. The
// fences let the copy engine, which is a proxy of its own, see the barrier before the first copy
// counts on it.
__device__ __forceinline__ void prepare(unsigned long long* arrived, int count = 1) {
  for (int k = 0; k < count; ++k)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(arrived + k)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect(unsigned long long* arrived, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(arrived)),
               "r"(bytes)
               : "memory");
}

// `to`, `from` and `bytes` are multiples of 16; bytes > 0.
__device__ __forceinline__ void copy(void* to, const void* from, int bytes,
                                     unsigned long long* arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(address(to)),
      "l"(from), "r"(bytes), "r"(address(arrived))
      : "memory");
}

__device__ __forceinline__ void wait(unsigned long long* arrived, unsigned phase) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address(arrived)), "r"(phase)
        : "memory");
}

#endif
