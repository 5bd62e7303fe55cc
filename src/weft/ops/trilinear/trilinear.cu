// Trilinear interpolation, forward and backward: y[n] = sum over k of weight(point n, k) features[n, k].
//
// Corner k = 4 bx + 2 by + bz of a cube has the coordinates 2 b - 1, and the weight (1 ± u)/2 (1 ± v)/2
// (1 ± w)/2. All tensors are contiguous; a vector has VEC_WIDTH features, at most 16 bytes, and no row ends
// within one. Arithmetic is in float, with one rounding at the end.
#include "numeric.cuh"

#ifndef VEC_WIDTH
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#endif
#ifndef LANES
#define LANES 32
#endif
constexpr int THREADS = 128, CORNERS = 8;
using Pack = Vector<WEFT_T, VEC_WIDTH>;

// Both sides of each axis for one point: (1 - p) / 2 and (1 + p) / 2. They are computed apart, because
// 1 - (1 + p) / 2 loses the digits of a point near a corner.
struct Sides {
  float at[3][2];
  __device__ __forceinline__ float x(int k) const { return at[0][k >> 2 & 1]; }
  __device__ __forceinline__ float y(int k) const { return at[1][k >> 1 & 1]; }
  __device__ __forceinline__ float z(int k) const { return at[2][k & 1]; }
};

__device__ __forceinline__ Sides sides_of(const float* point) {
  Sides sides;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const float p = point[axis];
    sides.at[axis][0] = (1.0f - p) * 0.5f;
    sides.at[axis][1] = (1.0f + p) * 0.5f;
  }
  return sides;
}

// Load one vector of all corners; the eight loads are independent and in flight together.
__device__ __forceinline__ void load_corners(Pack (&corners)[CORNERS], const WEFT_T* first, index_t width) {
#pragma unroll
  for (int k = 0; k < CORNERS; ++k)
    corners[k] = *reinterpret_cast<const Pack*>(first + k * width);
}

// features: (count, 8, width); points: (count, 3) float; y: (count, width). Thread i computes vector i of y.
// Bytes: features read and y written once; the threads of a point read its coordinates from L1.
extern "C" __global__ void __launch_bounds__(THREADS)
trilinear_forward(const WEFT_T* __restrict__ features, const float* __restrict__ points,
                  WEFT_T* __restrict__ y, index_t count, index_t width) {
  const index_t each = width / VEC_WIDTH;
  const index_t item = (index_t)blockIdx.x * THREADS + threadIdx.x;
  if (item >= count * each) return;
  const index_t n = item / each, column = item % each * VEC_WIDTH;
  Pack corners[CORNERS];
  load_corners(corners, features + n * CORNERS * width + column, width);
  const Sides sides = sides_of(points + 3 * n);
  float total[VEC_WIDTH] = {};
#pragma unroll
  for (int k = 0; k < CORNERS; ++k) {
    const float weight = sides.x(k) * sides.y(k) * sides.z(k);
#pragma unroll
    for (int e = 0; e < VEC_WIDTH; ++e) total[e] = fmaf(weight, element(corners[k], e), total[e]);
  }
  Pack out;
#pragma unroll
  for (int e = 0; e < VEC_WIDTH; ++e) out.at[e] = from_float<WEFT_T>(total[e]);
  *reinterpret_cast<Pack*>(y + n * width + column) = out;
}

// grad: (count, width); features, dfeatures: (count, 8, width); points, dpoints: (count, 3) float. LANES
// lanes of a warp have one point: each takes every LANES-th vector of it, and the lanes add their parts of
// the point's gradient by shuffles. Bytes: everything once.
extern "C" __global__ void __launch_bounds__(THREADS)
trilinear_backward(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ features,
                   const float* __restrict__ points, WEFT_T* __restrict__ dfeatures,
                   float* __restrict__ dpoints, index_t count, index_t width) {
  const int lane = threadIdx.x % LANES;
  const index_t n = (index_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  // Lanes behind the last point stay for the shuffles, which need all lanes of a warp.
  const bool is_point = n < count;
  const Sides sides = sides_of(points + 3 * (is_point ? n : 0));
  float dots[CORNERS] = {};  // gradient times features, by corner
  const index_t end = is_point ? width : 0;
  for (index_t column = (index_t)lane * VEC_WIDTH; column < end; column += LANES * VEC_WIDTH) {
    const index_t first = n * CORNERS * width + column;
    const Pack g = *reinterpret_cast<const Pack*>(grad + n * width + column);
    Pack corners[CORNERS];
    load_corners(corners, features + first, width);
#pragma unroll
    for (int k = 0; k < CORNERS; ++k) {
      const float weight = sides.x(k) * sides.y(k) * sides.z(k);
      Pack out;
#pragma unroll
      for (int e = 0; e < VEC_WIDTH; ++e) {
        dots[k] = fmaf(element(g, e), element(corners[k], e), dots[k]);
        out.at[e] = from_float<WEFT_T>(weight * element(g, e));
      }
      *reinterpret_cast<Pack*>(dfeatures + first + k * width) = out;
    }
  }
  // A weight's derivative by a coordinate is half the product of the other two sides, with the corner's sign.
  float sums[3] = {};
#pragma unroll
  for (int k = 0; k < CORNERS; ++k) {
    const float x = sides.x(k), y = sides.y(k), z = sides.z(k);
    sums[0] = fmaf(k & 4 ? y * z : -(y * z), dots[k], sums[0]);
    sums[1] = fmaf(k & 2 ? x * z : -(x * z), dots[k], sums[1]);
    sums[2] = fmaf(k & 1 ? x * y : -(x * y), dots[k], sums[2]);
  }
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
      sums[axis] += __shfl_xor_sync(0xffffffffu, sums[axis], step);
    if (is_point && lane == 0) dpoints[3 * n + axis] = 0.5f * sums[axis];
  }
}
