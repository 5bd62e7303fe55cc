// The emulated device of warp_emulator.hpp with what the kernels of ops/sparse24 use besides.
#define WEFT_STORE_16
#include "warp_emulator.hpp"

inline unsigned __vminu2(unsigned a, unsigned b) {
  return std::min(a & 0xffff, b & 0xffff) | std::min(a >> 16, b >> 16) << 16;
}
inline void store_16(void* to, uint4 v) {
  require((size_t)to % 16 == 0, "a store of 16 bytes that is not aligned");
  *(uint4*)to = v;
}
using std::memcpy;
