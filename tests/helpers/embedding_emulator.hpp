// What the embedding's kernels say to a warp beyond warp_emulator.hpp's words: integers from lane
// to lane, votes, and streamed accesses, held to their alignment.
#pragma once
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline int from_lane(int v, unsigned lane) { return together({.at = (unsigned)v})[lane].at; }
inline int __shfl_sync(unsigned, int v, int lane, unsigned width = 32) {
  return from_lane(v, current % 32 / width * width + lane % width);
}
inline int __shfl_xor_sync(unsigned, int v, int step) {
  return from_lane(v, current % 32 ^ step);
}
inline int __shfl_up_sync(unsigned, int v, unsigned step, unsigned width = 32) {
  const unsigned lane = current % 32;
  return from_lane(v, lane % width < step ? lane : lane - step);
}
inline int __shfl_down_sync(unsigned, int v, unsigned step, unsigned width = 32) {
  const unsigned lane = current % 32;
  return from_lane(v, lane % width + step < width ? lane + step : lane);
}
inline unsigned lanes_with(int v, int wanted) {
  const Lane* lanes = together({.at = (unsigned)v});
  unsigned found = 0;
  for (int i = 0; i < 32; ++i) found |= (unsigned)((int)lanes[i].at == wanted) << i;
  return found;
}
inline unsigned __ballot_sync(unsigned, bool v) { return lanes_with(v, 1); }
inline unsigned __match_any_sync(unsigned, int v) { return lanes_with(v, v); }
inline int atomicAdd(int* to, int v) { return std::exchange(*to, *to + v); }
template <typename T> void __stcs(T* to, T v) {
  require((size_t)to % sizeof v == 0, "a store to what is not aligned");
  std::memcpy(to, &v, sizeof v);
}
template <typename T> T __ldcs(const T* from) {
  require((size_t)from % sizeof(T) == 0, "a load from what is not aligned");
  T v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <typename T> T __ldcg(const T* from) { return __ldcs(from); }
inline void __threadfence() {}
inline int __syncthreads_or(int v) {
  static int found;
  __syncthreads();
  found = 0;
  __syncthreads();
  if (v) found = 1;
  __syncthreads();
  return found;
}
