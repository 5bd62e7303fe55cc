// A row's statistics from those of its warps, with one barrier (Chan, Golub and LeVeque, 1983).
//
// A warp sums what is left of its elements after a reference, so that a row far from zero keeps its
// digits. The error that a reference off by r leaves in a variance v is r^2 / v units in the last
// place. In float32, where that shows, it is the warp's mean (EXACT), by a walk of its own; else a
// mean of a few elements, and one walk is enough: of k of a warp's n it is off by n v / k squared
// at worst. Without a mean (CENTRED 0) the reference is 0.
// A row has CLUSTER blocks, or TEAM of a block's THREADS; VECTORS accesses a thread, STEP apart.
#pragma once
#include "norm.cuh"
#include "norm_barriers.cuh"

#ifndef VECTORS
#define VECTORS 4
#endif
#ifndef BACKWARD
#define BACKWARD 0
#endif
#ifndef FULL
#define FULL 0
#endif
#ifndef EXACT
#define EXACT (sizeof(WEFT_T) == 4)
#endif

constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

constexpr int WARPS = TEAM / 32, TEAMS = THREADS / TEAM, ENTRIES = CLUSTER * WARPS;
constexpr int WIDTH = ENTRIES < 32 ? power_of_two(ENTRIES) : 32;
constexpr int LOTS = (ENTRIES + 31) / 32;  // entries a lane reads
static_assert(CLUSTER == 1 || TEAMS == 1, "a block of a cluster is one team");
static_assert(CLUSTER <= 8 && THREADS % TEAM == 0 && TEAM % 32 == 0, "");

// A warp's sums of x - ref and of its square, and (BACKWARD) of g w and of g w (x - ref).
constexpr int KINDS = (1 + CENTRED) * (1 + BACKWARD), SQUARES = CENTRED, DOT = KINDS - 1;
constexpr int FIELDS = KINDS + CENTRED;  // the reference is the last
using Parts = Sums<KINDS>;

// Of each warp whose sums this lane merges: how many elements, and 1 over it (0 of 0).
struct Counts {
  float of[LOTS], inverse[LOTS];
};

// What a block has of every row, in accesses (constants, where rows are FULL): `each` at most,
// `count` from `begin` on of `all`.
struct Slice {
  int all, each, begin, count;
  __device__ __forceinline__ explicit Slice(index_t columns)
      : all(FULL ? TEAM * VECTORS * CLUSTER : columns / N), each((all + CLUSTER - 1) / CLUSTER),
        begin(min((int)(blockIdx.x % CLUSTER) * each, all)),
        count(FULL || CLUSTER == 1 ? each : min(each, all - begin)) {}
};

// The accesses that a warp of a team has of a slice of `count`.
__device__ __forceinline__ int accesses_of(int warp, int count) {
  if (FULL) return 32 * VECTORS;
  int n = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) n += max(0, min(32, count - i * TEAM - warp * 32));
  return n;
}

// `all` accesses a row, `each` of them a block.
__device__ __forceinline__ Counts counts_of(int all, int each) {
  Counts counts;
#pragma unroll
  for (int p = 0; p < LOTS; ++p) {
    const int entry = threadIdx.x % WIDTH + 32 * p, warp = entry % WARPS;
    const int slice = max(0, min(each, all - entry / WARPS * each));
    const int n = entry < ENTRIES ? accesses_of(warp, slice) : 0;
    counts.of[p] = n * N;
    counts.inverse[p] = n ? __frcp_rn((float)(n * N)) : 0.0f;
  }
  return counts;
}

// Keeps the compiler from holding on to the floats it made of these words: made again, a float
// costs an instruction; held, a register.
template <typename P> __device__ __forceinline__ void forget(P& p) {
  if (sizeof(P) == 4 * N) return;
  constexpr int WORDS = sizeof(P) / 4;  // none of a lone 16-bit element
  unsigned words[WORDS + 1];
  memcpy(words, &p, 4 * WORDS);
#pragma unroll
  for (int k = 0; k < WORDS; ++k) asm volatile("" : "+r"(words[k]));
  memcpy(&p, words, 4 * WORDS);
}

// What the warp's sums are about: its mean, or the mean of what its first lane has first. x holds
// zeros past the slice's `count`.
__device__ __forceinline__ float reference(const Pack (&x)[VECTORS], int count) {
  float sum[N] = {};
  if (!CENTRED) return 0.0f;
  if (EXACT) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) sum[0] += to_float(x[i].at[j]);
    const int n = accesses_of(threadIdx.x % TEAM / 32, count);
    return n ? warp_sum(sum[0]) * __frcp_rn((float)(n * N)) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sum[j] = to_float(x[0].at[j]);
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; ++j) sum[j] += sum[j + step];
  return __shfl_sync(0xffffffffu, sum[0] * (1.0f / N), 0);
}

// One of the warp's KINDS sums a lane: lane l has number l / (32 / KINDS). Half the lanes take half
// of the sums at each step, so four cost 6 shuffles and not 20.
__device__ __forceinline__ float scattered(Parts v) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = KINDS / 2, step = 16; half > 0; half /= 2, step /= 2)
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const bool high = lane & step;
      const float mine = high ? v.at[k + half] : v.at[k], theirs = high ? v.at[k] : v.at[k + half];
      v.at[k] = mine + __shfl_xor_sync(0xffffffffu, theirs, step);
    }
#pragma unroll
  for (int step = 16 / KINDS; step > 0; step /= 2)
    v.at[0] += __shfl_xor_sync(0xffffffffu, v.at[0], step);
  return v.at[0];
}

// Puts the warp's sums and reference into `table`, (ENTRIES, FIELDS) of shared memory, in every
// block of the row; COUNTED, in bytes, on its mbarrier `arrived`. Returns what `merged` wants of a
// warp that has a row for itself.
template <bool COUNTED = false>
__device__ __forceinline__ float put(const Parts& mine, float ref, float* table,
                                     unsigned long long* arrived = nullptr) {
  const float one = scattered(mine);
  if (ENTRIES == 1) return one;
  constexpr int LANES = 32 / KINDS;
  const int lane = threadIdx.x % 32, kind = lane / LANES, rank = lane % LANES;
  const int warp = threadIdx.x % TEAM / 32;
#if CLUSTER > 1
  float* to = table + (blockIdx.x % CLUSTER * WARPS + warp) * FIELDS;
  if (COUNTED) {
    if (rank < CLUSTER) send(rank, to + kind, one, arrived);
    if (CENTRED && lane < CLUSTER) send(lane, to + KINDS, ref, arrived);
    return one;
  }
  if (rank < CLUSTER) write_to(rank, to + kind, one);
  if (CENTRED && lane < CLUSTER) write_to(lane, to + KINDS, ref);
#else
  float* to = table + warp * FIELDS;
  if (rank == 0) to[kind] = one;
  if (CENTRED && lane == 0) to[KINDS] = ref;
#endif
  return one;
}

// All that share the row meet: what they have put is there. Two tables used by turns need no other
// barrier.
__device__ __forceinline__ void all_meet() {
  if (ENTRIES == 1) {
    __syncwarp();
    return;
  }
#if CLUSTER > 1
  cluster_barrier();
#else
  team_barrier();
#endif
}

// Of the whole row: its mean less the warp's reference, 1 / deviation, and (BACKWARD) the means of
// g w and of g w xhat.
struct Whole {
  float shift, scale, average, dot;
};

__device__ __forceinline__ Whole merged(float one, float ref, const float* table,
                                        const Counts& counts, float share, float eps) {
  float field[LOTS][FIELDS];
#pragma unroll
  for (int p = 0; p < LOTS; ++p)
#pragma unroll
    for (int k = 0; k < FIELDS; ++k) {
      const int entry = threadIdx.x % WIDTH + 32 * p;
      if (ENTRIES == 1)
        field[p][k] = k < KINDS ? __shfl_sync(0xffffffffu, one, k * (32 / KINDS)) : ref;
      else
        field[p][k] = entry < ENTRIES ? table[entry * FIELDS + k] : 0.0f;
    }
  float sum = 0.0f, grads = 0.0f, squares = 0.0f, dot = 0.0f;
  if (CENTRED) {
#pragma unroll
    for (int p = 0; p < LOTS; ++p) {
      sum += fmaf(counts.of[p], field[p][FIELDS - 1] - ref, field[p][0]);
      if (BACKWARD) grads += field[p][KINDS / 2];
    }
    sum = warp_sum<WIDTH>(sum) * share;
    if (BACKWARD) grads = warp_sum<WIDTH>(grads) * share;
  }
#pragma unroll
  for (int p = 0; p < LOTS; ++p) {
    // From the row's mean to that warp's reference, and to its mean.
    const float away = CENTRED ? field[p][FIELDS - 1] - ref - sum : 0.0f;
    squares += field[p][SQUARES];
    if (CENTRED) {
      const float left = field[p][0], off = fmaf(left, counts.inverse[p], away);
      squares += fmaf(counts.of[p] * off, off, -left * counts.inverse[p] * left);
    }
    if (BACKWARD) dot += CENTRED ? fmaf(away, field[p][KINDS / 2], field[p][DOT]) : field[p][DOT];
  }
  const float scale =
      inverse_root(not_below_zero(warp_sum<WIDTH>(squares)) * share + eps);
  if (BACKWARD) dot = warp_sum<WIDTH>(dot) * share * scale;
  return {sum, scale, grads, dot};
}
