// Norms forward by teams that stay: y = (x - mean) rstd w + b or x rstd w, each row read once.
//
// A team is some warps of a block, a block, or a cluster of blocks, and keeps its columns' weights
// in registers over all the rows it takes: read again for every row, w and b would be twice the
// bytes that x is, and past 8192 columns they come from L2. Rows come through a ring
// (norm_ring.cuh) and wait in registers for one barrier, after which they are written.
// x, r: (rows, columns), strides apart; w, b: (columns,); y, s: (rows, columns) contiguous. Rows,
// strides and pointers are multiples of 16 bytes. Bytes: n read + n written; with ADD 2n + 2n.
#define ACCESS (16 / sizeof(WEFT_T))
#include "norm_answer.cuh"
#include "norm_ring.cuh"

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
norm_stay(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
          const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
          WEFT_T* __restrict__ s, index_t rows, index_t columns, index_t x_stride,
          index_t r_stride, double eps) {
  __shared__ unsigned long long arrived[TEAMS][STAGES];
  __shared__ float table[2][TEAMS][ENTRIES * FIELDS];
  const Slice slice(columns);
  const int team = threadIdx.x / TEAM, first = threadIdx.x % TEAM;
  const index_t from = (index_t)slice.begin * N;
  const int bytes = slice.count * 16;
  Ring<1 + ADD> ring = {{x + from}, {x_stride}, (int)rows, bytes,
                        memory + team * STAGES * (1 + ADD) * bytes, arrived[team]};
  if (ADD) {
    ring.from[ADD] = r + from;
    ring.stride[ADD] = r_stride;
  }
  ring.start();
  const Counts counts = counts_of(slice.all, slice.each);
  const float share = __frcp_rn((float)columns);
  Scales scales;
  scales.load(w + from, b + from, first, slice.count);
  unsigned turn = 0;
  for (int row = first_row(); row < rows; row += row_step(), turn ^= 1) {
    ring.await();
    Pack in[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = first + i * TEAM;
      const bool there = FULL || at < slice.count;
      in[i] = there ? ring.held(0)[at] : zeros();
      if (!ADD || !there) continue;
      in[i] = added(in[i], ring.held(ADD)[at]);
      reinterpret_cast<Pack*>(s + (index_t)row * (slice.all * N) + from)[at] = in[i];
    }
    const float ref = reference(in[0]);
    const float one = exchange(sums_of(in, ref, first, slice.count), ref, table[turn][team]);
    ring.advance(row);
    const Whole whole = merged(one, ref, table[turn][team], counts, share, (float)eps);
    WEFT_T* const to = y + (index_t)row * (slice.all * N) + from;
    write_row<false>(in, ref, whole, scales, w, b, to, first, slice.count);
  }
}

#endif
