// The passes between the products of head_wgmma.py, a warp for each row of x.
//
// The product x W^T writes exp(logit - r), where r is the row's logit at its target: the largest logit is at
// least that, and not more than the loss above it. So no pass over the logits looks for a maximum first.
//
// The launches of a call are a sequence: each begins while the one before ends, and waits for it.
#define OVERLAP 1
#include "numeric.cuh"
#include "overlap.cuh"
#include "reduce.cuh"

using T = WEFT_T;
constexpr int THREADS = 256, WARPS = THREADS / 32, N = Wide<T>::N;

struct ReferenceArguments {
  const T *x, *weight;  // (rows, inner), (columns, inner), rows at multiples of 16 bytes
  const index_t* targets;
  float *target_logits, *references;  // (rows,)
  int* conditions;                    // one for each chunk_rows rows
  index_t rows, inner, columns, x_stride, weight_stride, ignore_index, chunk_rows;
};

struct RowArguments {
  const float* sums;  // (rows, tiles, 2): the largest logit, and the sum of exp(logit - reference)
  float* references;
  const float* target_logits;
  const index_t* targets;
  float *losses, *factors;  // (rows,)
  const T* x;
  T* scaled;        // (rows, inner), contiguous
  T* exponentials;  // (rows, columns), rows `pitch` apart
  const int* condition;
  index_t rows, tiles, inner, x_stride, pitch, columns, ignore_index;
  float z_loss, farthest;
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }
__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) < infinity(); }
__device__ __forceinline__ index_t row_of_warp() { return (index_t)blockIdx.x * WARPS + threadIdx.x / 32; }

// The logit of each row at its target, in float32, and the number that is subtracted from all its logits:
// +inf for an ignored row, whose exponentials become 0 whatever it contains; NaN for a target out of range.
extern "C" __global__ void __launch_bounds__(THREADS) head_references(const ReferenceArguments arguments) {
  launch_dependents();
  const index_t row = row_of_warp();
  if (row >= arguments.rows) return;
  const index_t target = arguments.targets[row];
  const bool counts = target != arguments.ignore_index;
  float logit = not_a_number();
  if (counts && target >= 0 && target < arguments.columns) {
    const T* x = arguments.x + row * arguments.x_stride;
    const T* w = arguments.weight + target * arguments.weight_stride;
    float sum = 0.0f;
    for (index_t i = threadIdx.x % 32 * N; i < arguments.inner; i += 32 * N) {
      const auto a = *reinterpret_cast<const Vector<T, N>*>(x + i);
      const auto b = *reinterpret_cast<const Vector<T, N>*>(w + i);
#pragma unroll
      for (int j = 0; j < N; ++j) sum = fmaf(to_float(a.at[j]), to_float(b.at[j]), sum);
    }
    logit = warp_sum(sum);
  }
  if (threadIdx.x % 32 != 0) return;
  arguments.target_logits[row] = counts ? logit : 0.0f;
  // A masked target, of -inf, leaves the other logits as they are, which may all be far below 0.
  const bool is_masked = logit == -infinity();
  const float reference = is_finite(logit) ? logit : is_masked ? 0.0f : not_a_number();
  if (is_masked) arguments.conditions[row / arguments.chunk_rows] = 1;  // by several rows: the same number
  arguments.references[row] = counts ? reference : infinity();
}

// Where a row's largest logit is far from its reference it becomes the reference, and the product is computed
// again. The condition is 1 if there may be such a row; otherwise there is nothing to do. A row of -inf
// alone, or with +inf, has a loss of NaN.
extern "C" __global__ void __launch_bounds__(THREADS) head_check(const RowArguments arguments) {
  launch_dependents();
  wait_for_previous_kernel();
  const index_t row = row_of_warp();
  if (*arguments.condition == 0 || row >= arguments.rows || arguments.references[row] == infinity()) return;
  const float* sums = arguments.sums + row * arguments.tiles * 2;
  float top = -infinity();
  for (index_t tile = threadIdx.x % 32; tile < arguments.tiles; tile += 32) top = fmaxf(top, sums[tile * 2]);
  top = warp_max(top);
  if (threadIdx.x % 32 != 0 || !(fabsf(top - arguments.references[row]) > arguments.farthest))
    return;
  arguments.references[row] = is_finite(top) ? top : not_a_number();
}

// With e = exp(logit - reference): the gradient of the loss is factor e, minus 1 at the target. That element
// is changed so that factor times it is the whole; then dx = factor (e W), and dW = e^T (factor x).
extern "C" __global__ void __launch_bounds__(THREADS) head_finish(const RowArguments arguments) {
  launch_dependents();
  wait_for_previous_kernel();
  const index_t row = row_of_warp();
  if (row >= arguments.rows) return;
  const int lane = threadIdx.x % 32;
  const float* sums = arguments.sums + row * arguments.tiles * 2;
  const index_t target = arguments.targets[row];
  const float reference = arguments.references[row], target_logit = arguments.target_logits[row];
  const bool counts = target != arguments.ignore_index;
  float total = 0.0f;
  for (index_t tile = lane; tile < arguments.tiles; tile += 32) total += sums[tile * 2 + 1];
  total = warp_sum(total);
  // A row with -inf alone has a total of 0; a NaN fails the comparison too.
  const float lse = total > 0.0f ? reference + logf(total) : not_a_number();
  const float slope = 1.0f + 2.0f * arguments.z_loss * lse;  // of the loss, by lse
  float factor = counts ? expf(reference - lse) * slope : 0.0f;
  if (counts && factor == 0.0f) factor = 1e-30f;  // 1 / factor must exist; its products are next to nothing
  if (lane == 0) {
    arguments.factors[row] = factor;
    arguments.losses[row] = counts ? lse - target_logit + arguments.z_loss * lse * lse : 0.0f;
    if (counts && target >= 0 && target < arguments.columns) {
      // p - 1 without cancellation where p is near 1.
      const float p_minus_1 = expm1f(target_logit - lse);
      const float gradient = p_minus_1 + 2.0f * arguments.z_loss * lse * (p_minus_1 + 1.0f);
      arguments.exponentials[row * arguments.pitch + target] = from_float<T>(gradient / factor);
    }
  }
  for (index_t i = lane * N; i < arguments.inner; i += 32 * N) {
    const auto in = *reinterpret_cast<const Vector<T, N>*>(arguments.x + row * arguments.x_stride + i);
    Vector<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.at[j] = from_float<T>(counts ? factor * to_float(in.at[j]) : 0.0f);
    *reinterpret_cast<Vector<T, N>*>(arguments.scaled + row * arguments.inner + i) = out;
  }
}
