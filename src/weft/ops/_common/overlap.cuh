// Programmatic dependent launch: a kernel may begin before the previous kernel on its stream has ended
// (`overlap=` of backends/nvrtc.py). Both functions compile to nothing unless OVERLAP is 1.
#pragma once

#ifndef OVERLAP
#define OVERLAP 0
#endif
#if OVERLAP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define WEFT_OVERLAPS 1
#else
#define WEFT_OVERLAPS 0
#endif

// Allows the next kernel to begin once every block of this one has called it or ended. From then on no block
// of this kernel is waiting for an SM, so that the next kernel's blocks take no space from them.
__device__ __forceinline__ void launch_dependents() {
#if WEFT_OVERLAPS
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel has ended and its writes are visible. A `const __restrict__` pointer must
// not be used for them: it promises that the data does not change during this kernel, so that loads may move
// above the wait. Every block calls it, even one that reads none of those writes: the kernel after this one
// waits for this one alone.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if WEFT_OVERLAPS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
