// Mean of (rows,) losses over the rows whose target counts: one block, and one launch where PyTorch's own
// calls would take four. Bytes: 12 for each row; the block adds up in a fixed order.
#include "numeric.cuh"
#include "reduce.cuh"

// mean, count: one float each. Without a row that counts the mean is 0 / 0 = NaN, as PyTorch's is.
extern "C" __global__ void __launch_bounds__(THREADS)
mean_of_rows(const float* losses, const index_t* targets, float* mean, float* count, index_t rows,
             index_t ignore_index) {
  __shared__ float sums[32], counts[32];
  float sum = 0.0f, counted = 0.0f;  // a count below 2^24 is exact
  for (index_t row = threadIdx.x; row < rows; row += THREADS) {
    sum += losses[row];  // an ignored row has 0
    counted += targets[row] != ignore_index ? 1.0f : 0.0f;
  }
  sum = block_sum(sum, sums);
  counted = block_sum(counted, counts);
  if (threadIdx.x == 0) {
    *count = counted;
    *mean = sum / counted;
  }
}
