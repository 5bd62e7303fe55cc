// Hopper's emulated device (hopper_emulator.hpp) with the 16-byte accesses of ops/conv2d.
#define WEFT_CONV2D_PTX
#include "hopper_emulator.hpp"

inline uint4 load_16(unsigned from) {
  uint4 v;
  std::memcpy(&v, shared_at(from, 16), 16);
  return v;
}
inline void store_16(void* to, uint4 v) {
  require((size_t)to % 16 == 0, "a store of 16 bytes that is not aligned");
  *(uint4*)to = v;
}
using std::memcpy;
