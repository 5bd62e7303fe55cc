// What kernels that follow each other say where the later may begin before the earlier has ended
// (programmatic dependent launch; `overlap` of backends/nvrtc.py): nothing unless OVERLAP is 1.
#pragma once

#ifndef OVERLAP
#define OVERLAP 0
#endif
#if OVERLAP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define WEFT_OVERLAPS 1
#else
#define WEFT_OVERLAPS 0
#endif

// The next kernel's blocks may come once every block of this one has said so or ended: they then
// have room, since none of this kernel's is left to come.
__device__ __forceinline__ void let_next_begin() {
#if WEFT_OVERLAPS
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before this one has ended, and what it wrote can be read; but not through a
// pointer that is const and restrict, which says that nobody writes there while this kernel is on.
// Every block says this, also one that reads nothing of it: the next kernel waits for this alone.
__device__ __forceinline__ void wait_for_previous() {
#if WEFT_OVERLAPS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
