// Norms forward of long rows by clusters that take one row after another, and keep their weights.
//
// Past 16384 columns weights do not stay in L1: read from L2 for each row they are as many bytes as
// the row, or with a bias twice, and L2 is then the limit, not memory. Here each block of a cluster
// has its slice of them in shared memory, read once for all its rows. The next row is asked for
// before the current one's sums are exchanged, and an mbarrier counts these: the cluster's own
// barrier would wait until the row before is written to memory.
// x, r: (rows, columns), strides apart; w, b: (columns,); y, s: (rows, columns) contiguous; 2^30
// rows at most, and no more clusters than rows. x and r in multiples of 16 bytes.
// Bytes: n read + n written; with ADD 2n + 2n. Shared memory: the slices of w and (CENTRED) of b,
// VECTORS accesses a thread of each, of which a thread reads only its own.
#define ACCESS (16 / sizeof(WEFT_T))
#include "bulk.cuh"
#include "norm_answer.cuh"

#ifndef RESIDENT
#define RESIDENT 1
#endif

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

// What a thread has of a row on its way: words, which the compiler would else hold as halves.
struct Coming {
  uint4 x[VECTORS], more[ADD ? VECTORS : 1];

  __device__ __forceinline__ void load(const WEFT_T* x_from, const WEFT_T* r_from, int count) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      x[i] = {0, 0, 0, 0};
      if (ADD) more[ADD ? i : 0] = {0, 0, 0, 0};
      if (!FULL && at >= count) continue;
      x[i] = reinterpret_cast<const uint4*>(x_from)[at];
      if (ADD) more[ADD ? i : 0] = reinterpret_cast<const uint4*>(r_from)[at];
    }
  }
  __device__ __forceinline__ Pack arrived(int i) const {
    Pack p, extra;
    memcpy(&p, &x[i], 16);
    if (!ADD) return p;
    memcpy(&extra, &more[ADD ? i : 0], 16);
    p = added(p, extra);
    forget(p);
    return p;
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
norm_walk(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
          const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
          WEFT_T* __restrict__ s, index_t rows, index_t columns, index_t x_stride,
          index_t r_stride, double eps) {
  __shared__ float table[2][ENTRIES * FIELDS];
  __shared__ unsigned long long arrived[2];
#if CLUSTER > 1
  if (threadIdx.x == 0) prepare(arrived, 2);
  cluster_arrive_relaxed();
#endif
  const Slice slice(columns);
  const index_t from = (index_t)slice.begin * N;
  const int step = gridDim.x / CLUSTER, end = rows;
  int row = blockIdx.x / CLUSTER;
  Coming next;
  next.load(x + row * x_stride + from, r + row * r_stride + from, slice.count);
  Weights* const scales = reinterpret_cast<Weights*>(memory);
  Weights* const shifts = scales + (CENTRED ? VECTORS * THREADS : 0);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (!FULL && at >= slice.count) continue;
    scales[at] = reinterpret_cast<const Weights*>(w + from)[at];
    if (CENTRED) shifts[at] = reinterpret_cast<const Weights*>(b + from)[at];
  }
  const Counts counts = counts_of(slice.all, slice.each);
  const float share = __frcp_rn((float)columns);
#if CLUSTER > 1
  cluster_wait();
#endif
  for (unsigned taken = 0; row < end; row += step, ++taken) {
    const int turn = taken % 2;
    Pack in[1][VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      in[0][i] = next.arrived(i);
      if (ADD && (FULL || at < slice.count))
        reinterpret_cast<Pack*>(s + row * columns + from)[at] = in[0][i];
    }
    if (row + step < end)
      next.load(x + (row + step) * x_stride + from, r + (row + step) * r_stride + from,
                slice.count);
    const float ref[1] = {reference(in[0], slice.count)};
    const Parts sums = sums_of(in[0], ref[0], threadIdx.x, slice.count);
#if CLUSTER > 1
    if (threadIdx.x == 0) expect(arrived + turn, sizeof(table[0]));
    const float one = put<true>(sums, ref[0], table[turn], arrived + turn);
    wait(arrived + turn, taken / 2 % 2);
    __syncwarp();
#else
    const float one = put(sums, ref[0], table[turn]);
    all_meet();
#endif
    const Whole whole[1] = {merged(one, ref[0], table[turn], counts, share, (float)eps)};
    Scales held;
    write_rows<true>(in, ref, whole, held, reinterpret_cast<const WEFT_W*>(scales),
                     reinterpret_cast<const WEFT_W*>(shifts), y + row * columns + from, columns, 1,
                     slice.count);
  }
}

#endif
