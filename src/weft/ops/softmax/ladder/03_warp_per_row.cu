// Step 3: one warp for each row, whose lanes exchange registers by shuffles: no shared memory, no barrier.
// Each lane adds columns / 32 elements. Bytes: 3n read + n written, the second and third read mostly from the
// caches.
#include "numeric.cuh"
#include "reduce.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. THREADS / 32 rows a
// block.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_warp_per_row(const WEFT_T* x, WEFT_T* y, index_t rows, index_t columns, index_t stride) {
  const index_t row = (index_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;  // uniform over a warp, so that all lanes take part in the shuffles below
  x += row * stride;
  y += row * columns;

  float top = __int_as_float(0xff800000);  // -inf
  for (index_t j = lane; j < columns; j += 32) top = fmaxf(top, to_float(x[j]));
  top = warp_max(top);
  float total = 0.0f;
  for (index_t j = lane; j < columns; j += 32) total += expf(to_float(x[j]) - top);
  total = warp_sum(total);
  for (index_t j = lane; j < columns; j += 32)
    y[j] = from_float<WEFT_T>(expf(to_float(x[j]) - top) / total);
}
