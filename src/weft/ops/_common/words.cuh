// N elements of one access, kept in 32-bit registers.
//
// As 2-byte elements, each would take a register of its own. Stores are streaming (evict first): outputs must
// not evict from the L2 cache what neighbours read again. A store is one instruction: the compiler may split
// that of a structure of elements, where these are computed at different times.
#pragma once
#include "numeric.cuh"

template <int BYTES> struct WordType { using type = unsigned; };
template <> struct WordType<2> { using type = unsigned short; };

template <typename T, int N> struct alignas(sizeof(T) * N) Words {
  static constexpr int BYTES = sizeof(T) * N, COUNT = BYTES < 4 ? 1 : BYTES / 4;
  typename WordType<BYTES>::type at[COUNT];
};

template <typename T, int N> __device__ __forceinline__ Words<T, N> no_words() {
  Words<T, N> zeros;
#pragma unroll
  for (int i = 0; i < Words<T, N>::COUNT; ++i) zeros.at[i] = 0;
  return zeros;
}

template <typename T, int N> __device__ __forceinline__ Words<T, N> load_words(const T* from) {
  return *reinterpret_cast<const Words<T, N>*>(from);
}

// Returns element j as a float.
template <typename T, int N> __device__ __forceinline__ float element(const Words<T, N>& v, int j) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(v.at[j]);
  } else if constexpr (UPPER<T>) {
    // bfloat16 is the upper half of a float: a shift or a mask.
    const unsigned word = v.at[j / 2];
    return __uint_as_float(j % 2 ? word & 0xffff0000u : word << 16);
  } else {
    const unsigned short bits = (unsigned short)((unsigned)v.at[j / 2] >> (j % 2 * 16));
    T value;
    memcpy(&value, &bits, sizeof(value));
    return to_float(value);
  }
}

// Returns N floats, rounded to T.
template <typename T, int N> __device__ __forceinline__ Words<T, N> to_words(const float (&v)[N]) {
  Words<T, N> words;
#pragma unroll
  for (int i = 0; i < Words<T, N>::COUNT; ++i) {
    constexpr int EACH = N / Words<T, N>::COUNT;
    T values[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) values[j] = from_float<T>(v[i * EACH + j]);
    memcpy(&words.at[i], values, sizeof(values));
  }
  return words;
}

template <typename T, int N> __device__ __forceinline__ void store_words(T* to, const Words<T, N>& v) {
  if constexpr (Words<T, N>::BYTES == 16)
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(v.at[0], v.at[1], v.at[2], v.at[3]));
  else if constexpr (Words<T, N>::BYTES == 8)
    __stcs(reinterpret_cast<uint2*>(to), make_uint2(v.at[0], v.at[1]));
  else
    *reinterpret_cast<Words<T, N>*>(to) = v;
}
