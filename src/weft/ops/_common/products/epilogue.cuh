// What a product's epilogue computes from its float32 sums, two adjacent columns at a time.
#pragma once
#include "elementwise_math.cuh"
#include "numeric.cuh"

#ifndef EPILOGUE
#define EPILOGUE 0
#endif

namespace {

using T = WEFT_T;
constexpr float LOG2E = 1.4426950408889634f;
// c = the sums; plus a bias; then GELU (tanh form), also with its input as a second output; or plus a
// residual. Without a bias: times GELU's slope at a second matrix, whose column sums are stored too; exp(sums
// - a number of the row), with the largest sum and the total of each tile's rows; times a number of the row;
// added to c in parts (struct Sum24).
enum { PLAIN, BIAS, GELU, GELU_PRE, RESIDUAL, SLOPE, EXPONENTIAL, ROW_SCALE, ACCUMULATE };
constexpr bool HAS_BIAS = EPILOGUE >= BIAS && EPILOGUE <= RESIDUAL;
// The copy engine brings a tile of a second matrix.
constexpr bool LOADS_EXTRA = EPILOGUE == RESIDUAL || EPILOGUE == SLOPE || EPILOGUE == ACCUMULATE;

// GELU takes two operations of the special-function unit an element, as long as a product with K = 256. The
// form with one has an error of 2^-11 of x: an eighth of bfloat16's last place, but one of float16's.
template <typename U> __device__ __forceinline__ float gelu_value(float x) { return gelu(x).value; }
template <> __device__ __forceinline__ float gelu_value<__nv_bfloat16>(float x) { return gelu_by_tanh(x); }

__device__ __forceinline__ void activate(float (&two)[2]) {
  two[0] = gelu_value<T>(two[0]);
  two[1] = gelu_value<T>(two[1]);
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ void multiply_by_slopes(float (&two)[2], const Vector<T, 2>& pre) {
  two[0] *= gelu(to_float(pre.at[0])).slope;
  two[1] *= gelu(to_float(pre.at[1])).slope;
}

__device__ __forceinline__ void add(float (&two)[2], const Vector<T, 2>& addends) {
  two[0] += to_float(addends.at[0]);
  two[1] += to_float(addends.at[1]);
}

__device__ __forceinline__ Vector<T, 2> as_pair(unsigned word) {
  Vector<T, 2> two;
  memcpy(&two, &word, 4);
  return two;
}

__device__ __forceinline__ unsigned rounded(const float (&two)[2]) {
  const T elements[2] = {from_float<T>(two[0]), from_float<T>(two[1])};
  unsigned word;
  memcpy(&word, elements, 4);
  return word;
}

// A sum of products that are computed one after the other, between them: the upper 24 bits of a float32, of
// which the upper 16 stand where the result will, as a bfloat16, and the others in memory of their own. The
// last bit is 1 if a bit that was cut off is (rounding to odd): it has no bias, and nothing carries, so
// that NaN stays NaN. It is at most 2^-15 of the sum, a 64th of a bfloat16's rounding.
struct Sum24 {
  unsigned upper, lower;  // of two adjacent columns: 16 bits each, and the lower 16 bits as two bytes
  __device__ __forceinline__ void add_to(float (&two)[2]) const {
    two[0] += __uint_as_float(upper << 16 | (lower & 0xff) << 8);
    two[1] += __uint_as_float(upper & 0xffff0000 | lower & 0xff00);
  }
  static __device__ __forceinline__ Sum24 of(const float (&two)[2]) {
    unsigned bits[2] = {__float_as_uint(two[0]), __float_as_uint(two[1])};
#pragma unroll
    for (int i = 0; i < 2; ++i) bits[i] |= (bits[i] & 0xff) != 0 ? 0x100 : 0;
    return {bits[0] >> 16 | bits[1] & 0xffff0000, bits[0] >> 8 & 0xff | bits[1] & 0xff00};
  }
};

// Adds each of a thread's COUNT values over the eight lanes whose numbers have the same remainder by 4, in a
// fixed order. Each lane gets COUNT / 8 of the sums, from number first_of_lane() on.
template <int COUNT> __device__ __forceinline__ int first_of_lane() {
  const int lane = threadIdx.x % 32;
  return ((lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1)) * (COUNT / 8);
}
template <int STEP, int HALF, int COUNT>
__device__ __forceinline__ void add_halves(float (&values)[COUNT]) {
  // A lane gives one half of its values away, and gets the other lane's share of its own half.
  const bool is_upper = threadIdx.x & STEP;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float given_away = is_upper ? values[i] : values[i + HALF];
    const float own = is_upper ? values[i + HALF] : values[i];
    values[i] = own + __shfl_xor_sync(~0u, given_away, STEP);
  }
}
template <int COUNT> __device__ __forceinline__ void add_over_rows(float (&values)[COUNT]) {
  add_halves<16, COUNT / 2>(values);
  add_halves<8, COUNT / 4>(values);
  add_halves<4, COUNT / 8>(values);
}

// The thread's two of each 8 columns of the bias; zeros from column `columns` on, a multiple of 8.
template <int COUNT>
__device__ __forceinline__ void load_bias(Vector<T, 2> (&pairs)[COUNT], const T* bias, int columns) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    pairs[i] = i * 8 < columns ? *reinterpret_cast<const Vector<T, 2>*>(bias + i * 8 + threadIdx.x % 4 * 2)
                               : Vector<T, 2>{};
}

}  // namespace
