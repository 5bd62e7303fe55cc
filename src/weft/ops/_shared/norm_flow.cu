// Norms forward of long rows by clusters whose rows flow through shared memory.
//
// As norm_walk.cu: a cluster takes one row after another, and its weights are read once. But what
// is on its way lies in a ring of STAGES slices that the bulk copy engine fills, and no thread
// holds registers for it, so that several rows may be. A slice is read once, into registers; when
// the row's sums have come from every warp of the cluster, each has read its part, and the next row
// is asked for in its place: the ring needs no barrier of its own. Weights stay in registers (HELD)
// or in shared memory. A block ends when all that others send to it has come.
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

// Accesses by words, which the compiler would else hold as halves, and what they hold.
template <typename P> struct Words {
  uint4 word[sizeof(P) / 16] = {};

  __device__ __forceinline__ void load(const void* from, int at, bool there) {
    if (!FULL && !there) return;
#pragma unroll
    for (int k = 0; k < (int)(sizeof(P) / 16); ++k)
      word[k] = reinterpret_cast<const uint4*>(from)[at * (sizeof(P) / 16) + k];
  }
  __device__ __forceinline__ P held() {
    P p;
    memcpy(&p, word, sizeof(P));
    return p;
  }
  // What was made of the words is made anew.
  __device__ __forceinline__ P anew() {
#pragma unroll
    for (int k = 0; k < (int)(sizeof(P) / 16); ++k)
      asm volatile("" : "+r"(word[k].x), "+r"(word[k].y), "+r"(word[k].z), "+r"(word[k].w));
    return held();
  }
};

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
  Words<Weights> scale[VECTORS], shift[CENTRED ? VECTORS : 1];
#pragma unroll
  for (int i = 0; HELD && i < VECTORS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    scale[i].load(w + from, at, at < slice.count);
    if (CENTRED) shift[CENTRED ? i : 0].load(b + from, at, at < slice.count);
  }
  const Counts counts = counts_of(slice.all, slice.each);
  const float share = __frcp_rn((float)columns);
  int stage = 0;
  unsigned phase = 0, taken = 0;
  for (int row = first; row < flow.end; row += step, ++taken) {
    const int turn = taken % 2;
    if (slice.count) wait(arrived + stage, phase);
    Words<Pack> in[VECTORS];
    Pack held[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      in[i].load(flow.at(stage), at, at < slice.count);
      held[i] = in[i].held();
      if (!ADD || (!FULL && at >= slice.count)) continue;
      held[i] = added(held[i], flow.at(stage)[PART + at]);
      memcpy(in[i].word, &held[i], sizeof(Pack));
      reinterpret_cast<uint4*>(s + row * columns + from)[at] = in[i].word[0];
    }
    const float ref = reference(held, slice.count);
    const Parts sums = sums_of(held, ref, threadIdx.x, slice.count);
#if CLUSTER > 1
    if (!taken) cluster_wait();
    if (threadIdx.x == 0) expect(met + turn, sizeof(table[0]));
    const float one = put<true>(sums, ref, table[turn], met + turn);
    wait(met + turn, taken / 2 % 2);
    __syncwarp();
#else
    const float one = put(sums, ref, table[turn]);
    all_meet();
#endif
    if (threadIdx.x == 0) flow.ask(row + STAGES * step, stage);
    if (++stage == STAGES) stage = 0, phase ^= 1;
    const Whole whole = merged(one, ref, table[turn], counts, share, (float)eps);
    const float less = -whole.shift * whole.scale;
    if (!HELD && !taken && slice.count) wait(weighed, 0);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * THREADS;
      if (!FULL && at >= slice.count) continue;
      const Pack x_at = in[i].anew();
      Weights w_at, b_at;
      w_at = HELD ? scale[i].anew() : scales[at];
      if (CENTRED) b_at = HELD ? shift[CENTRED ? i : 0].anew() : shifts[at];
      Pack out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float off = to_float(x_at.at[j]) - ref;
        const float hat = CENTRED ? fmaf(off, whole.scale, less) : off * whole.scale;
        const float scaled = hat * to_float(w_at.at[j]);
        out.at[j] = from_float<WEFT_T>(CENTRED ? scaled + to_float(b_at.at[j]) : scaled);
      }
      reinterpret_cast<Pack*>(y + row * columns + from)[at] = out;
    }
  }
}

#endif
