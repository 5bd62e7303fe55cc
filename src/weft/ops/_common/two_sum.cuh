// A float32 sum that keeps its rounding errors.
//
// Equal terms have rounding errors of one sign, so that a thread's sum of many rows is off by as many units
// in the last place. The error of each addition is a float itself and is found by five more (D. Knuth, "The
// Art of Computer Programming", volume 2, section 4.2.2).
#pragma once

struct TwoSum {
  float total = 0.0f, lost = 0.0f;
  __device__ __forceinline__ void add(float v) {
    const float sum = total + v, added = sum - total;
    lost += (total - (sum - added)) + (v - added);
    total = sum;
  }
  // `lost` is NaN once the sum is not finite; the sum itself is then right.
  __device__ __forceinline__ float value() const { return lost == lost ? total + lost : total; }
};
