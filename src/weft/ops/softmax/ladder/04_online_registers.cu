// Step 4: maximum and sum in one pass, online in registers. When a thread meets a larger maximum, it rescales
// its sum so far (Milakov and Gimelshein, arXiv:1805.02867). One block for each row. Bytes: 2n read + n
// written.
#include "numeric.cuh"
#include "reduce.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_online_registers(const WEFT_T* x, WEFT_T* y, index_t rows, index_t columns,
                         index_t stride) {
  __shared__ float tops[32], totals[32];
  x += blockIdx.x * stride;
  y += blockIdx.x * columns;

  // The maximum starts at the least finite float: -inf - -inf would be NaN.
  float mine = -3.4028234663852886e38f, total = 0.0f;
  for (index_t j = threadIdx.x; j < columns; j += THREADS) {
    const float v = to_float(x[j]);
    // The branch is rarely taken after the first elements; a NaN fails it, and v - mine then makes the total
    // NaN.
    if (v > mine) {
      total *= expf(mine - v);
      mine = v;
    }
    total += expf(v - mine);
  }
  const float top = block_max(mine, tops);
  total = block_sum(total * expf(mine - top), totals);

  for (index_t j = threadIdx.x; j < columns; j += THREADS)
    y[j] = from_float<WEFT_T>(expf(to_float(x[j]) - top) / total);
}
