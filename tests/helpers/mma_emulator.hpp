// The products by mma.sync (ops/_common/products/mma_ptx.cuh) on a CPU: warp_emulator.hpp, and what it has not.
#define WEFT_MMA_PTX
#include "warp_emulator.hpp"

inline unsigned shared_word(unsigned at) { return *(unsigned*)shared_at(at, 4); }
