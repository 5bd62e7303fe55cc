// The products by mma.sync (ops/_common/products/mma_ptx.cuh) on a CPU: warp_emulator.hpp, and what it has not.
#define WEFT_MMA_PTX
#include "warp_emulator.hpp"

template <int SIZE> inline void copy_async(unsigned to, const void* from, int valid) {
  static_assert(SIZE == 16);
  // What a copy of no bytes reads from is any address.
  copy_async(to, valid ? from : nullptr, valid);
}
inline unsigned shared_word(unsigned at) { return *(unsigned*)shared_at(at, 4); }
