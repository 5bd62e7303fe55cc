// Norms forward of long rows by clusters whose rows flow through shared memory.
//
// As norm_walk.cu: a cluster takes one row after another, and its weights are read once. But what
// is on its way lies in a ring of STAGES slices that the bulk copy engine fills, and no thread holds
// registers for it, so that several rows may be. A slice is read once, into registers; when the
// row's sums have come from every warp of the cluster, each has read its part, and the next row is
// asked for in its place: the ring needs no barrier of its own. Weights stay in registers (HELD) or
// in shared memory. A block ends when all that others send to it has come.
// x, r: (rows, columns), strides apart; w, b: (columns,); y, s: (rows, columns) contiguous; 2^30
// rows at most, and no more clusters than rows. x and r in multiples of 16 bytes.
// Bytes: n read + n written; with ADD 2n + 2n. Shared memory: the ring, then unless HELD the slices
// of w and (CENTRED) of b; each slice VECTORS accesses a thread.
#define ACCESS (16 / sizeof(WEFT_T))
#include "bulk.cuh"
#include "norm_answer.cuh"

#ifndef RESIDENT
#define RESIDENT 1
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef HELD
#define HELD 0
#endif

#if __CUDA_ARCH__ >= 900

extern __shared__ __align__(128) unsigned char memory[];

constexpr int PART = THREADS * VECTORS;  // accesses that a block has room for of each slice
constexpr int TENSORS = 1 + ADD, BARRIERS = STAGES + 3;

// The slices of a block on their way: stage k has x's, and then (ADD) r's.
struct Flow {
  const WEFT_T *x, *r;
  index_t x_stride, r_stride;
  int end, bytes;
  unsigned long long* arrived;  // STAGES barriers

  __device__ __forceinline__ Pack* at(int stage) const {
    return reinterpret_cast<Pack*>(memory) + stage * TENSORS * PART;
  }
  __device__ __forceinline__ void ask(int row, int stage) const {
    if (row >= end || !bytes) return;
    expect(arrived + stage, TENSORS * bytes);
    copy(at(stage), x + row * x_stride, bytes, arrived + stage);
    if (ADD) copy(at(stage) + PART, r + row * r_stride, bytes, arrived + stage);
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
norm_flow(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ r,
          const WEFT_W* __restrict__ w, const WEFT_W* __restrict__ b, WEFT_T* __restrict__ y,
          WEFT_T* __restrict__ s, index_t rows, index_t columns, index_t x_stride,
          index_t r_stride, double eps) {
  __shared__ float table[2][ENTRIES * FIELDS];
  __shared__ unsigned long long arrived[BARRIERS];  // of rows, of sums by turns, of weights
  unsigned long long *const met = arrived + STAGES, *const weighed = met + 2;
  const Slice slice(columns);
  const index_t from = (index_t)slice.begin * N;
  const int step = gridDim.x / CLUSTER, first = blockIdx.x / CLUSTER;
  const Flow flow = {x + from,  r + from,       x_stride, r_stride,
                     (int)rows, slice.count * 16, arrived};
  Weights* const scales = reinterpret_cast<Weights*>(flow.at(STAGES));
  Weights* const shifts = scales + (CENTRED ? PART : 0);
  if (threadIdx.x == 0) {
    prepare(arrived, BARRIERS);
    flow.ask(first, 0);
    if (!HELD && slice.count) {
      const int bytes = slice.count * sizeof(Weights);
      expect(weighed, (1 + CENTRED) * bytes);
      copy(scales, w + from, bytes, weighed);
      if (CENTRED) copy(shifts, b + from, bytes, weighed);
    }
    for (int k = 1; k < STAGES; ++k) flow.ask(first + k * step, k);
  }
  __syncthreads();
#if CLUSTER > 1
  cluster_arrive_relaxed();
#endif
  Scales held;
  if (HELD) held.load(w + from, b + from, threadIdx.x, slice.count);
  const Counts counts = counts_of(slice.all, slice.each);
  const float share = __frcp_rn((float)columns);
  int stage = 0;
  unsigned phase = 0, taken = 0;
  for (int row = first; row < flow.end; row += step, ++taken) {
    const int turn = taken % 2;
    if (slice.count) wait(arrived + stage, phase);
    Pack in[1][VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      in[0][i] = zeros();
      if (!FULL && at >= slice.count) continue;
      in[0][i] = flow.at(stage)[at];
      if (!ADD) continue;
      in[0][i] = added(in[0][i], flow.at(stage)[PART + at]);
      reinterpret_cast<Pack*>(s + row * columns + from)[at] = in[0][i];
    }
    const float ref[1] = {reference(in[0], slice.count)};
    const Parts sums = sums_of(in[0], ref[0], threadIdx.x, slice.count);
#if CLUSTER > 1
    if (!taken) cluster_wait();
    if (threadIdx.x == 0) expect(met + turn, sizeof(table[0]));
    const float one = put<true>(sums, ref[0], table[turn], met + turn);
    wait(met + turn, taken / 2 % 2);
    __syncwarp();
#else
    const float one = put(sums, ref[0], table[turn]);
    all_meet();
#endif
    if (threadIdx.x == 0) flow.ask(row + STAGES * step, stage);
    if (++stage == STAGES) stage = 0, phase ^= 1;
    const Whole whole[1] = {merged(one, ref[0], table[turn], counts, share, (float)eps)};
    if (!HELD && !taken && slice.count) wait(weighed, 0);
#pragma unroll
    for (int i = 0; HELD && i < VECTORS; ++i) {
      forget(held.scale[i]);
      if (CENTRED) forget(held.shift[CENTRED ? i : 0]);
    }
    write_rows<!HELD>(in, ref, whole, held, reinterpret_cast<const WEFT_W*>(scales),
                      reinterpret_cast<const WEFT_W*>(shifts), y + row * columns + from, columns,
                      1, slice.count);
  }
}

#endif
