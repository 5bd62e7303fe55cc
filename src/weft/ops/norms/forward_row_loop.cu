// Norms forward of long rows: clusters loop over rows and keep their weights in shared memory.
//
// Past 16384 columns weights do not stay in L1: read from L2 for each row they are as many bytes as
// the row, or with a bias twice as many, and L2 becomes the limit instead of memory. Here each block
// of a cluster has its slice of them in shared memory, read once for all its rows. The next row's
// loads, into registers, are issued before the current row's sums are exchanged. An mbarrier counts
// the exchanged bytes: the cluster's own barrier would also wait until the previous row's stores
// have reached memory.
// x, r: (rows, columns), with row strides; w, b: (columns,); y, s: (rows, columns) contiguous; at
// most 2^30 rows, and no more clusters than rows. Rows are multiples of 16 bytes.
// Bytes: n read + n written; with RESIDUAL 2n + 2n. Shared memory: the slices of w and (CENTRED) of
// b, VECS_PER_THREAD vectors a thread of each; a thread reads only its own vectors, so that no
// barrier is needed between writing and reading them.
#define VEC_WIDTH (16 / sizeof(WEFT_T))
#include "hopper.cuh"
#include "forward_row.cuh"

#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

// A thread's part of the row in flight, as 32-bit words. The compiler would otherwise hold 16-bit
// elements one a register.
struct NextRow {
  uint4 x[VECS_PER_THREAD], residual[RESIDUAL ? VECS_PER_THREAD : 1];

  __device__ __forceinline__ void load(const WEFT_T* x_from, const WEFT_T* r_from, int count) {
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = threadIdx.x + i * THREADS;
      x[i] = {0, 0, 0, 0};
      if (RESIDUAL) residual[RESIDUAL ? i : 0] = {0, 0, 0, 0};
      if (!NO_TAIL && at >= count) continue;
      x[i] = reinterpret_cast<const uint4*>(x_from)[at];
      if (RESIDUAL) residual[RESIDUAL ? i : 0] = reinterpret_cast<const uint4*>(r_from)[at];
    }
  }
  // Vector i of x, or (RESIDUAL) of x + r.
  __device__ __forceinline__ Pack vector(int i) const {
    Pack p, r;
    memcpy(&p, &x[i], 16);
    if (!RESIDUAL) return p;
    memcpy(&r, &residual[RESIDUAL ? i : 0], 16);
    p = add_residual(p, r);
    discard_floats(p);
    return p;
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_PER_SM)
norm_row_loop(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
              const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
              WEFT_T* __restrict__ s, index_t rows, index_t columns, index_t x_stride,
              index_t r_stride, double eps) {
  __shared__ float table[2][ROW_WARPS * NUM_FIELDS];
  __shared__ unsigned long long sums_arrived[2];
#if CLUSTER > 1
  if (threadIdx.x == 0) init_mbarriers(sums_arrived, 2);
  cluster_arrive_relaxed();
#endif
  const Slice slice(columns / N);
  const index_t from = (index_t)slice.begin * N;
  // int suffices: the host refuses more than 2^30 rows.
  const int row_step = gridDim.x / CLUSTER, end = rows;
  int row = blockIdx.x / CLUSTER;
  NextRow next;
  next.load(x + row * x_stride + from, r + row * r_stride + from, slice.count);
  Weights* const weights = reinterpret_cast<Weights*>(memory);
  Weights* const biases = weights + (CENTRED ? VECS_PER_THREAD * THREADS : 0);
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (!NO_TAIL && at >= slice.count) continue;
    weights[at] = reinterpret_cast<const Weights*>(w + from)[at];
    if (CENTRED) biases[at] = reinterpret_cast<const Weights*>(b + from)[at];
  }
  const WarpCounts<> counts = warp_counts(slice.per_row, slice.per_block);
  const float inverse_columns = __frcp_rn((float)columns);
#if CLUSTER > 1
  cluster_wait();  // the other blocks' mbarriers are initialised
#endif
  for (unsigned iteration = 0; row < end; row += row_step, ++iteration) {
    const int parity = iteration % 2;  // selects the table and its mbarrier
    Pack in[1][VECS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int at = threadIdx.x + i * THREADS;
      in[0][i] = next.vector(i);
      if (RESIDUAL && (NO_TAIL || at < slice.count))
        reinterpret_cast<Pack*>(s + row * columns + from)[at] = in[0][i];
    }
    // The next row's loads are issued before this row's sums, so that they are in flight during the exchange.
    if (row + row_step < end)
      next.load(x + (row + row_step) * x_stride + from, r + (row + row_step) * r_stride + from,
                slice.count);
    const float ref[1] = {warp_reference(in[0], slice.count)};
    const PartialSums sums = thread_sums(in[0], ref[0], threadIdx.x, slice.count);
#if CLUSTER > 1
    if (threadIdx.x == 0) mbarrier_expect_bytes(sums_arrived + parity, sizeof(table[0]));
    const float total = publish_partials<true>(sums, ref[0], table[parity], sums_arrived + parity);
    mbarrier_wait(sums_arrived + parity, iteration / 2 % 2);  // its phase flips at every second row
    __syncwarp();
#else
    const float total = publish_partials(sums, ref[0], table[parity]);
    row_barrier();
#endif
    const RowStatistics statistics[1] = {
        merge_partials(total, ref[0], table[parity], counts, inverse_columns, (float)eps)};
    ThreadWeights loaded;
    write_rows<true>(in, ref, statistics, loaded, Columns(reinterpret_cast<const WEFT_W*>(weights)),
                     Columns(reinterpret_cast<const WEFT_W*>(biases)), y + row * columns + from, columns,
                     1, slice.count);
  }
}

#endif
