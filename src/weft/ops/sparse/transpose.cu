// Parts of the transposition of a matrix in CSR, and of its gradients. A stable sort of the columns lies
// between nonzero_rows and the others (ops/sort): it brings the nonzeros into the order of the transposed
// matrix.
//
// nonzero_rows: the row of each nonzero, and its column as a key of the sort. gather_nonzeros: values or rows
// in the new order. column_starts: the offsets of the transposed matrix. value_gradients: for each nonzero
// the product of its row of the gradient and its row of the dense factor. No sum depends on a schedule.
#include "sorted_search.cuh"
#include "sparse.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef LANES
#define LANES 1  // of a nonzero in value_gradients, a power of two up to 32
#endif

constexpr int ITEMS = 8;  // nonzeros of a thread of nonzero_rows
constexpr int TILE = THREADS * ITEMS, WARPS = THREADS / 32;

// columns: (nonzeros,); offsets: (rows + 1,); row_numbers, keys: (nonzeros,). A column out of range has the
// key `size`, behind all others. rows_a_nonzero: the mean.
extern "C" __global__ void __launch_bounds__(THREADS)
nonzero_rows(const int* __restrict__ columns, const offset_t* __restrict__ offsets,
             int* __restrict__ row_numbers, int* __restrict__ keys, index_t rows, index_t nonzeros,
             index_t size, double rows_a_nonzero) {
  __shared__ int heads[TILE];
  __shared__ int warp_last[WARPS];
  __shared__ offset_t limits[2];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const index_t start = (index_t)blockIdx.x * TILE;
  const int count = (int)(nonzeros - start < TILE ? nonzeros - start : TILE);
  for (int i = thread; i < count; i += THREADS) {
    const int column = columns[start + i];
    keys[start + i] = is_column(column, size) ? column : (int)size;
  }
  for (int i = thread; i < TILE; i += THREADS) heads[i] = 0;
  if (warp < 2) {
    // Rows that begin at or before the tile's first nonzero, and before its end.
    const offset_t position = (offset_t)(warp ? start + count : start + 1);
    const offset_t begun =
        count_below(offsets, position, (offset_t)rows, (offset_t)(position * rows_a_nonzero));
    if (lane == 0) limits[warp] = begun;
  }
  __syncthreads();
  const offset_t first = limits[0] > 0 ? limits[0] - 1 : 0;
  if (thread == 0) heads[0] = (int)first;
  // A nonempty row has a begin of its own, so that no two threads write one place.
  for (offset_t row = limits[0] + thread; row < limits[1]; row += THREADS) {
    const index_t at = offsets[row] - start;
    if (at > 0 && at < count && offsets[row + 1] > offsets[row]) heads[at] = (int)row;
  }
  __syncthreads();
  // Row numbers rise: that of a nonzero is the largest head up to it.
  int last = 0, mine[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    last = max(last, heads[thread * ITEMS + i]);
    mine[i] = last;
  }
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(ALL, last, step);
    if (lane >= step) last = max(last, left);
  }
  if (lane == 31) warp_last[warp] = last;
  const int left = __shfl_up_sync(ALL, last, 1);
  int before = lane ? left : 0;
  __syncthreads();
  for (int k = 0; k < warp; ++k) before = max(before, warp_last[k]);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) heads[thread * ITEMS + i] = max(before, mine[i]);
  __syncthreads();
  for (int i = thread; i < count; i += THREADS) row_numbers[start + i] = heads[i];
}

// order, values, moved: (nonzeros,).
extern "C" __global__ void __launch_bounds__(THREADS)
gather_nonzeros(const index_t* __restrict__ order, const WEFT_T* __restrict__ values,
                WEFT_T* __restrict__ moved, index_t nonzeros) {
  const index_t i = (index_t)blockIdx.x * THREADS + threadIdx.x;
  if (i < nonzeros) moved[i] = values[order[i]];
}

// sorted: (nonzeros,) keys; starts: (size + 1,), how many keys are below each column.
extern "C" __global__ void __launch_bounds__(THREADS)
column_starts(const int* __restrict__ sorted, offset_t* __restrict__ starts, index_t nonzeros, index_t size) {
  const index_t column = (index_t)blockIdx.x * THREADS + threadIdx.x;
  if (column > size) return;
  index_t low = 0, high = nonzeros;
  while (low < high) {
    const index_t middle = low + (high - low) / 2;
    if (sorted[middle] < column) low = middle + 1;
    else high = middle;
  }
  starts[column] = (offset_t)low;
}

// grad: (rows, k); dense: (size, k); gradients: (nonzeros,). A wrong column has the gradient NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
value_gradients(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ dense,
                const int* __restrict__ row_numbers, const int* __restrict__ columns,
                WEFT_T* __restrict__ gradients, index_t nonzeros, index_t size, index_t k) {
  const index_t at = (index_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
  acc_t sum = 0;
  if (at < nonzeros) {
    const int column = columns[at];
    const WEFT_T* of_row = grad + row_numbers[at] * k;
    if (!is_column(column, size)) sum = acc_t(__int_as_float(0x7fc00000));
    else
      for (index_t i = lane; i < k; i += LANES) sum += widen(of_row[i]) * widen(dense[column * k + i]);
  }
  // All lanes of the warp take part, also those without a nonzero.
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
  if (at < nonzeros && lane == 0) gradients[at] = narrow<WEFT_T>(sum);
}
