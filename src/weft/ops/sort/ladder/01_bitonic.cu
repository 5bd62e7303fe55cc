// Step 1: a block sorts a row in shared memory by a bitonic network (K. Batcher, "Sorting networks and their
// applications", 1968).
//
// Comparisons do not depend on the data: log2(n) (log2(n) + 1) / 2 rounds, with a barrier after each. A
// network is not stable, so that the index decides between equal keys.
// Bytes: the row read once and, in another order, once more; written once.
#include "../digits.cuh"

#ifndef SIZE
#define SIZE 2048  // power of two that is no less than a row
#endif

// x: (gridDim.x, columns), rows at x_stride elements; y: (gridDim.x, columns).
extern "C" __global__ void __launch_bounds__(THREADS)
bitonic(const Key* __restrict__ x, Key* __restrict__ y, index_t columns, index_t x_stride,
        index_t descending) {
  __shared__ Key keys[SIZE];
  __shared__ unsigned short places[SIZE];
  const Key* row = x + blockIdx.x * x_stride;
  const Key flip = descending ? (Key)~(Key)0 : (Key)0;
  for (int i = threadIdx.x; i < SIZE; i += THREADS) {
    // Past the row's end, the largest key with a larger index than any element's.
    keys[i] = i < columns ? ordered(row[i], flip) : (Key)~(Key)0;
    places[i] = (unsigned short)i;
  }
  __syncthreads();
  for (int run = 2; run <= SIZE; run *= 2)
    for (int step = run / 2; step > 0; step /= 2) {
      for (int i = threadIdx.x; i < SIZE; i += THREADS) {
        const int other = i ^ step;
        if (other < i) continue;  // the lower one of two exchanges both
        const bool is_above = keys[i] > keys[other] || (keys[i] == keys[other] && places[i] > places[other]);
        if (is_above != ((i & run) == 0)) continue;  // every second run is in falling order
        const Key key = keys[i];
        const unsigned short place = places[i];
        keys[i] = keys[other], places[i] = places[other];
        keys[other] = key, places[other] = place;
      }
      __syncthreads();
    }
  for (int i = threadIdx.x; i < columns; i += THREADS) y[blockIdx.x * columns + i] = row[places[i]];
}
