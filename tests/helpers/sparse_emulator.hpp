// The emulated device of scan_emulator.hpp with what the kernels of sparse products use besides.
#define WEFT_STREAMED_LOADS
#include <array>
#include "scan_emulator.hpp"

template <typename T> T load_streamed(const T* from) {
  if ((size_t)from % sizeof(T)) std::fprintf(stderr, "a load that is not aligned\n"), std::abort();
  return *from;
}
template <typename T> T __ldcs(const T* from) { return load_streamed(from); }
// A double is two words, each an exchange of its own.
template <typename F> double by_words(double v, F exchange) {
  auto words = std::bit_cast<std::array<unsigned, 2>>(v);
  for (unsigned& word : words) word = exchange(word);
  return std::bit_cast<double>(words);
}
inline double __shfl_xor_sync(unsigned all, double v, int step) {
  return by_words(v, [&](unsigned word) { return __shfl_xor_sync(all, word, step); });
}
inline double __shfl_up_sync(unsigned all, double v, int step, int width) {
  return by_words(v, [&](unsigned word) { return __shfl_up_sync(all, word, step, width); });
}
