// A search of a rising sequence by a warp.
#pragma once

// Returns the number of elements below `value`, to every lane of the calling warp. The first round asks
// elements around `guess`, at distances that double; later ones ask 32 elements at once. In a sequence of
// equal steps the guess is right, and two rounds of loads are enough. T is a signed integer of 32 or 64 bits
// that also holds `size` and `guess` plus 2^15.
template <typename T>
__device__ __forceinline__ T count_below(const T* __restrict__ sorted, T value, T size, T guess) {
  constexpr unsigned WARP = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  // Distances -2^15 ... -2, -1, 0, 1, 3, ... 2^15 - 1, in the order of the lanes.
  const auto distance = [](int i) { return i < 16 ? -(1 << (15 - i)) : (1 << (i - 16)) - 1; };
  const T asked = guess + distance(lane);
  const bool is_below = asked < 0 || (asked < size && sorted[asked] < value);
  const int count = __popc(__ballot_sync(WARP, is_below));
  T low = 0, high = size;
  if (count > 0 && guess + distance(count - 1) >= 0) low = guess + distance(count - 1) + 1;
  if (count < 32 && guess + distance(count) < size) high = guess + distance(count);
  while (low < high) {
    const T step = (high - low + 31) / 32, at = low + lane * step + step - 1;
    const bool before = at < high && sorted[at] < value;
    low += __popc(__ballot_sync(WARP, before)) * step;
    // The last element of the next part is not below the value, or lies past the end.
    high = low + step - 1 < high ? low + step - 1 : high;
  }
  return low;
}
