// A softmax in CUDA C++, one warp per row, without host code: the header describes the launch.
//
//     weft check softmax --with examples/mine/softmax.cu
//     weft bench softmax --with examples/mine/softmax.cu
//
// weft: operator softmax
// weft: name cuda/warp-a-row
// weft: idea one warp per row, two passes with a running maximum
// weft: require contiguous x
// weft: let columns = x.shape[-1]; rows = x.numel() / columns
// weft: output y = empty_like(x)
// weft: launch softmax_warp<<<cdiv(rows, 4), 128>>>(x, y, rows, columns)

// Adds v to a running sum of exp(x - top), where top is the largest value so far.
__device__ void accumulate(float v, float& top, float& total) {
  if (v > top) {
    total = total * expf(top - v) + 1.0f;
    top = v;
  } else {
    total += expf(v - top);  // a NaN takes this branch and stays
  }
}

// x, y: (rows, columns), contiguous; scalar_t is float, __half or __nv_bfloat16. A block of four
// warps computes four rows, lane i of a warp columns i, i + 32, ... Bytes: 2n read, n written.
extern "C" __global__ void softmax_warp(const scalar_t* x, scalar_t* y, long long rows,
                                        long long columns) {
  const long long row = (long long)blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= rows) return;  // the whole warp returns, so the shuffles have all lanes
  const int lane = threadIdx.x % 32;
  x += row * columns;
  y += row * columns;
  float top = -3.4028235e38f, total = 0.0f;  // the smallest finite number: -inf - -inf would be NaN
  for (long long j = lane; j < columns; j += 32) accumulate((float)x[j], top, total);
  for (int step = 16; step > 0; step /= 2) {
    const float other_top = __shfl_xor_sync(0xffffffffu, top, step);
    const float other_total = __shfl_xor_sync(0xffffffffu, total, step);
    const float higher = fmaxf(top, other_top);
    total = total * expf(top - higher) + other_total * expf(other_top - higher);
    top = higher;
  }
  for (long long j = lane; j < columns; j += 32)
    y[j] = (scalar_t)(expf((float)x[j] - top) / total);
}
