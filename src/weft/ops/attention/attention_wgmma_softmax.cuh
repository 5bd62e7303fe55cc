// Online softmax in registers, for attention_wgmma.cu: scores of a warp group's accumulators become weights.
//
// A thread has COUNT scores of 2 COUNT keys: parts of two rows, element i of row i / 2 % 2.
#pragma once

namespace {

// The reference of a row's exponentials may lag behind its maximum by this power of 2 before the sums are
// rescaled. Weights up to 2^8 fit float16 and round like those below 1. After the first tile a rescale is
// rare.
constexpr float LAG = 8.0f;

// Online softmax of a thread's two rows. A thread's total covers its own columns only.
struct Softmax {
  float top[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f};

  // Replaces scores by weights 2^(scale s - top), after raising top to the scores' maximum if it lags too
  // far. Returns true if a row of the warp was raised: the sums of its outputs are to be multiplied by
  // `shrink`. Without BAND every query sees the first key, so that no top is -inf after the first tile.
  template <int COUNT>
  __device__ __forceinline__ bool weigh(float (&s)[COUNT], float scale, float (&shrink)[2]) {
    float most[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[i]);
    bool raised = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Lanes 4 l to 4 l + 3 share a row.
      most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffff, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffff, most[h], 2)) * scale;
      shrink[h] = 1.0f;
      if (most[h] > top[h] + LAG) {
        // At the first tile top is -inf and shrink is 0. A NaN score fails the comparison, and reaches the
        // total below.
        shrink[h] = power_of_2(top[h] - most[h]);
        top[h] = most[h];
        total[h] *= shrink[h];
        raised = true;
      }
    }
    // A row that has seen no key yet has weights of 0: -inf - -inf would be NaN.
    float pivot[2] = {top[0], top[1]};
#pragma unroll
    for (int h = 0; BAND && h < 2; ++h)
      if (top[h] == -INFINITE) pivot[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      s[i] = power_of_2(fmaf(s[i], scale, -pivot[i / 2 % 2]));
      total[i / 2 % 2] += s[i];
    }
    return __any_sync(0xffffffff, raised);
  }

  // Adds the totals of the four lanes that share a row; 1 for a row that has seen no key.
  __device__ __forceinline__ float divisor(int h) const {
    float sum = total[h];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    return sum == 0.0f ? 1.0f : sum;
  }
};

// Sets scores of hidden keys to -inf: those from `left[h]` on, counted from the thread's first column, and
// with BAND those before the last `window` of them.
template <int COUNT>
__device__ __forceinline__ void mask(float (&s)[COUNT], const int (&left)[2], const int (&begin)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int column = accumulator_column(0, i), h = i / 2 % 2;
    if (column >= left[h] || (BAND && column < begin[h])) s[i] = -INFINITE;
  }
}

// Replaces scores by the tangents of their capped logits: tanh(x) = 1 - 2 / (2^(2 log2(e) x) + 1), with an
// absolute error of 2^-22, where tanh.approx has 2^-11 of its result. A score of +inf gives 1, one of -inf
// -1.
template <int COUNT> __device__ __forceinline__ void cap(float (&s)[COUNT], float cap_scale) {
#pragma unroll
  for (int i = 0; SOFTCAP && i < COUNT; ++i)
    s[i] = fmaf(-2.0f, reciprocal(power_of_2(s[i] * cap_scale) + 1.0f), 1.0f);
}

// Rounds weights to the registers of a first factor.
template <int STEPS>
__device__ __forceinline__ void round_weights(unsigned (&p)[STEPS][4], const float (&s)[8 * STEPS]) {
#pragma unroll
  for (int i = 0; i < 4 * STEPS; ++i) p[i / 4][i % 4] = rounded_pair<T>(s[2 * i], s[2 * i + 1]);
}

}  // namespace
