// Statistics of a row from the partial sums of its warps, with one barrier a row (Chan, Golub and
// LeVeque, "Algorithms for computing the sample variance", 1983).
//
// A row belongs to a team: TEAM threads of one block's THREADS, or CLUSTER whole blocks. A thread
// holds VECS_PER_THREAD vectors of it, TEAM vectors apart.
//
// Each warp sums x - reference and its square, so that a row far from zero keeps its digits. A
// reference that is off by r leaves an error of r^2 / v units in the last place in a variance v.
// For float32, where that shows, the reference is the warp's own mean (EXACT_MEAN), which costs a
// second pass over registers. Otherwise it is the mean of a few elements: for k of a warp's n
// elements it is off by n v / k squared at worst. RMS norm (CENTRED 0) uses 0.
#pragma once
#include "hopper.cuh"
#include "norm.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef TEAM
#define TEAM THREADS
#endif
#ifndef VECS_PER_THREAD
#define VECS_PER_THREAD 4
#endif
#ifndef BACKWARD
#define BACKWARD 0
#endif
#ifndef NO_TAIL
#define NO_TAIL 0  // 1: every thread has all its vectors, and loads need no predicate
#endif
#ifndef EXACT_MEAN
#define EXACT_MEAN (sizeof(WEFT_T) == 4)
#endif
#ifndef SINGLE_REFERENCE
#define SINGLE_REFERENCE 0  // 1: all warps of a row use one reference, see the end of this file
#endif
// 1: one float has the row's mean, which is off by 2^-24 of itself; 16-bit elements beside it are at least
// 2^-11 of it apart. It saves an instruction an element.
#ifndef ONE_FLOAT_MEAN
#define ONE_FLOAT_MEAN SINGLE_REFERENCE
#endif
#ifndef STAGES
#define STAGES 3  // rows of shared memory, in kernels with such
#endif

// The smallest power of two that is not below n: shuffles reduce over groups of such a size.
constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

constexpr bool IS_SHIFTED = PEEL == 2;
constexpr int TEAM_WARPS = TEAM / 32, TEAMS = THREADS / TEAM;
constexpr int ROW_WARPS = CLUSTER * TEAM_WARPS;  // warps that share a row
static_assert(CLUSTER == 1 || TEAMS == 1, "a block of a cluster is one team");
static_assert(CLUSTER <= 16 && THREADS % TEAM == 0 && TEAM % 32 == 0, "");

// Sums of x - reference (CENTRED), of its square, and in the backward of g w (CENTRED) and of
// g w (x - reference).
constexpr int NUM_SUMS = (1 + CENTRED) * (1 + BACKWARD), SQUARES = CENTRED, DOT = NUM_SUMS - 1;
constexpr int NUM_FIELDS = NUM_SUMS + CENTRED;  // the last field is the warp's reference
using PartialSums = Sums<NUM_SUMS>;

// Barrier among the TEAM threads of each team. Named barrier 0 belongs to __syncthreads, so teams
// use 1 and up.
__device__ __forceinline__ void team_barrier() {
  if (TEAM == THREADS) {
    __syncthreads();
  } else if (TEAM == 32) {
    __syncwarp();
  } else {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / TEAM), "n"(TEAM) : "memory");
  }
}

// Barrier among all threads that share a row: their published partial sums are visible after it.
// Two tables in alternation need no further barrier (see block_sums).
__device__ __forceinline__ void row_barrier() {
  if (ROW_WARPS == 1) {
    __syncwarp();
    return;
  }
#if CLUSTER > 1
  cluster_barrier();
#else
  team_barrier();
#endif
}

// Element counts of the warps whose sums this lane merges, and 1 / count (0 for an empty warp). ENTRIES: the
// warps of a row, or the blocks of one, if the sums of each block's warps have been merged before.
template <int ENTRIES = ROW_WARPS> struct WarpCounts {
  static constexpr int LANES = ENTRIES < 32 ? power_of_two(ENTRIES) : 32;  // that merge the sums
  static constexpr int PER_LANE = (ENTRIES + 31) / 32;
  float count[PER_LANE], inverse[PER_LANE];

  __device__ __forceinline__ void set(int p, int elements) {
    count[p] = elements;
    inverse[p] = elements ? __frcp_rn((float)elements) : 0.0f;
  }
};

// The part of every row that belongs to this block, in vectors: at most `per_block`, `count` from
// `begin` on, of `per_row`. With NO_TAIL all are compile-time constants.
struct Slice {
  int per_row, per_block, begin, count;
  __device__ __forceinline__ explicit Slice(int vectors)
      : per_row(NO_TAIL ? TEAM * VECS_PER_THREAD * CLUSTER : vectors),
        per_block((per_row + CLUSTER - 1) / CLUSTER),
        begin(min((int)(blockIdx.x % CLUSTER) * per_block, per_row)),
        count(NO_TAIL || CLUSTER == 1 ? per_block : min(per_block, per_row - begin)) {}
};

// Number of vectors that warp `warp` of a team has of a slice of `count` vectors.
__device__ __forceinline__ int warp_vectors(int warp, int count) {
  // Known at compile time: the counts, and all code that depends on them, become constants.
  if (NO_TAIL) return 32 * VECS_PER_THREAD;
  int n = 0;
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) n += max(0, min(32, count - i * TEAM - warp * 32));
  return n;
}

// The row's first warp has its `edges` too (row_view.cuh).
__device__ __forceinline__ WarpCounts<> warp_counts(int per_row, int per_block, int edges = 0) {
  WarpCounts<> counts;
#pragma unroll
  for (int p = 0; p < counts.PER_LANE; ++p) {
    const int row_warp = threadIdx.x % counts.LANES + 32 * p, warp = row_warp % TEAM_WARPS;
    const int slice = max(0, min(per_block, per_row - row_warp / TEAM_WARPS * per_block));
    const int n = row_warp < ROW_WARPS ? warp_vectors(warp, slice) : 0;
    counts.set(p, n * N + (PEEL && row_warp == 0 ? edges : 0));
  }
  return counts;
}

// The same for the blocks of a cluster.
__device__ __forceinline__ WarpCounts<CLUSTER> block_counts(const Slice& slice, int edges) {
  WarpCounts<CLUSTER> counts;
  const int block = threadIdx.x % counts.LANES;
  const int vectors = max(0, min(slice.per_block, slice.per_row - block * slice.per_block));
  counts.set(0, vectors * N + (PEEL && block == 0 ? edges : 0));
  return counts;
}

// The warp's reference: its mean (EXACT_MEAN), or the mean of its first lane's first vector. x holds
// zeros past the slice's `count`. Of the row's edges the warp has `edges` and this thread `edge`, or 0.
__device__ __forceinline__ float warp_reference(const Pack (&x)[VECS_PER_THREAD], int count,
                                                float edge = 0.0f, int edges = 0) {
  float sum[N] = {};
  if (!CENTRED) return 0.0f;
  if (EXACT_MEAN) {
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) sum[0] += to_float(x[i].at[j]);
    if (PEEL) sum[0] += edge;
    const int n = warp_vectors(threadIdx.x % TEAM / 32, count) * N + (PEEL ? edges : 0);
    return n ? warp_sum(sum[0]) * __frcp_rn((float)n) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sum[j] = to_float(x[0].at[j]);
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; ++j) sum[j] += sum[j + step];
  return __shfl_sync(0xffffffffu, sum[0] * (1.0f / N), 0);
}

// The mean of the first four elements of a vector, which each thread reads itself; 0 for RMS norm.
__device__ __forceinline__ float mean_of_four(const Body<Pack>& body) {
  if (!CENTRED) return 0.0f;
  Vector<WEFT_T, 4> head;
  if constexpr (PEEL == 2) {
    const Pack first = body[0];
    memcpy(&head, &first, sizeof(head));
  } else {
    head = *reinterpret_cast<const Vector<WEFT_T, 4>*>(body.base);
  }
  return 0.25f * ((element(head, 0) + element(head, 1)) + (element(head, 2) + element(head, 3)));
}

// Reduce-scatter over the warp: returns one of the NUM_SUMS totals to each lane; lane l gets number
// l / (32 / NUM_SUMS). In each step half the lanes take half of the sums, so four sums cost 6
// shuffles instead of 20.
__device__ __forceinline__ float reduce_scatter(PartialSums v) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = NUM_SUMS / 2, step = 16; half > 0; half /= 2, step /= 2)
#pragma unroll
    for (int k = 0; k < half; ++k) {
      // The upper half of the lanes hands over its first sums and takes the other half's last ones.
      const bool upper = lane & step;
      const float mine = upper ? v.at[k + half] : v.at[k];
      const float theirs = upper ? v.at[k] : v.at[k + half];
      v.at[k] = mine + __shfl_xor_sync(0xffffffffu, theirs, step);
    }
  // Each lane now has one sum, which 32 / NUM_SUMS lanes share: a plain butterfly finishes it.
#pragma unroll
  for (int step = 16 / NUM_SUMS; step > 0; step /= 2)
    v.at[0] += __shfl_xor_sync(0xffffffffu, v.at[0], step);
  return v.at[0];
}

// Writes the warp's sums and reference into `table`, (ROW_WARPS, NUM_FIELDS) in the shared memory of
// every block of the row. COUNT_BYTES: the stores also count their bytes on the mbarrier `arrived`
// of the receiving block. Returns this lane's total, which merge_partials needs where one warp has
// the whole row.
template <bool COUNT_BYTES = false>
__device__ __forceinline__ float publish_partials(const PartialSums& partials, float ref, float* table,
                                                  unsigned long long* arrived = nullptr) {
  const float total = reduce_scatter(partials);
  if (ROW_WARPS == 1) return total;
  constexpr int LANES = 32 / NUM_SUMS;
  const int lane = threadIdx.x % 32, sum_index = lane / LANES, rank = lane % LANES;
  const int warp = threadIdx.x % TEAM / 32;
#if CLUSTER > 1
  float* row = table + (blockIdx.x % CLUSTER * TEAM_WARPS + warp) * NUM_FIELDS;
  // Lane `rank` of each sum's lanes writes to block `rank` of the cluster.
  if (COUNT_BYTES) {
    if (rank < CLUSTER) send_to_block(rank, row + sum_index, total, arrived);
    if (CENTRED && lane < CLUSTER) send_to_block(lane, row + NUM_SUMS, ref, arrived);
    return total;
  }
  if (rank < CLUSTER) store_to_block(rank, row + sum_index, total);
  if (CENTRED && lane < CLUSTER) store_to_block(lane, row + NUM_SUMS, ref);
#else
  float* row = table + warp * NUM_FIELDS;
  if (rank == 0) row[sum_index] = total;
  if (CENTRED && lane == 0) row[NUM_SUMS] = ref;
#endif
  return total;
}

// Statistics of the whole row: its mean less this warp's reference (`shift`), 1 / deviation (`rstd`),
// and in the backward the means of g w (`mean_gw`) and of g w xhat (`mean_gw_xhat`).
struct RowStatistics {
  float shift, rstd, mean_gw, mean_gw_xhat;
};

// What the second pass over a row needs, computed once.
struct alignas(32) RowTerms {  // read as vectors
  float ref, rstd, offset, mean_gw, mean_gw_xhat, mean, slope;

  RowTerms() = default;
  __device__ __forceinline__ RowTerms(const RowStatistics& row, float ref_)
      : ref(ref_), rstd(row.rstd), offset(-row.shift * row.rstd), mean_gw(row.mean_gw * row.rstd),
        mean_gw_xhat(row.mean_gw_xhat * row.rstd), mean(ref_ + row.shift),
        slope(mean_gw_xhat * row.rstd) {}  // `slope` includes rstd twice: for xhat and for dx

  // dx of an element, without the gradient of s. Adds the element to its column's sums over all rows of a
  // team, in float32, in the order of the rows; norm_sum_partials adds the blocks' sums.
  __device__ __forceinline__ float gradient(float g, float x, float weight, float& dw, float& db) const {
    if (CENTRED) db += g;
    if (ONE_FLOAT_MEAN) {
      // `scaled` has the factor rstd that `diff` lacks: their product is g xhat.
      const float diff = CENTRED ? x - mean : x, scaled = g * rstd;
      dw = fmaf(scaled, diff, dw);
      return fmaf(scaled, weight, -(CENTRED ? fmaf(diff, slope, mean_gw) : diff * slope));
    }
    const float diff = x - ref, xhat = CENTRED ? fmaf(diff, rstd, offset) : diff * rstd;
    dw = fmaf(g, xhat, dw);
    return fmaf(g * weight, rstd, -(CENTRED ? fmaf(xhat, mean_gw_xhat, mean_gw) : xhat * mean_gw_xhat));
  }
};

// Merges the warps' sums about their own references. `inverse_columns` is 1 / columns.
template <int ENTRIES>
__device__ __forceinline__ RowStatistics merge_partials(float total, float ref, const float* table,
                                                        const WarpCounts<ENTRIES>& counts,
                                                        float inverse_columns, float eps) {
  constexpr int LANES = WarpCounts<ENTRIES>::LANES, PER_LANE = WarpCounts<ENTRIES>::PER_LANE;
  float field[PER_LANE][NUM_FIELDS];
#pragma unroll
  for (int p = 0; p < PER_LANE; ++p)
#pragma unroll
    for (int k = 0; k < NUM_FIELDS; ++k) {
      const int row_warp = threadIdx.x % LANES + 32 * p;
      if (ENTRIES == 1)
        field[p][k] = k < NUM_SUMS ? __shfl_sync(0xffffffffu, total, k * (32 / NUM_SUMS)) : ref;
      else
        field[p][k] = row_warp < ENTRIES ? table[row_warp * NUM_FIELDS + k] : 0.0f;
    }
  float shift = 0.0f, sum_gw = 0.0f, squares = 0.0f, dot = 0.0f;
  if (CENTRED) {
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p) {
      // A warp's sum about its own reference, moved to this warp's reference: + count (reference - ref).
      shift += fmaf(counts.count[p], field[p][NUM_FIELDS - 1] - ref, field[p][0]);
      if (BACKWARD) sum_gw += field[p][NUM_SUMS / 2];
    }
    shift = warp_sum<LANES>(shift) * inverse_columns;
    if (BACKWARD) sum_gw = warp_sum<LANES>(sum_gw) * inverse_columns;
  }
#pragma unroll
  for (int p = 0; p < PER_LANE; ++p) {
    // `away`: from the row's mean to that warp's reference; `off`: to that warp's mean.
    const float away = CENTRED ? field[p][NUM_FIELDS - 1] - ref - shift : 0.0f;
    squares += field[p][SQUARES];
    if (CENTRED) {
      const float diff = field[p][0], off = fmaf(diff, counts.inverse[p], away);
      // The parallel variance formula: the sum of squares about the warp's own mean, plus count times the
      // squared distance of that mean from the row's mean.
      squares += fmaf(counts.count[p] * off, off, -diff * counts.inverse[p] * diff);
    }
    if (BACKWARD) dot += CENTRED ? fmaf(away, field[p][NUM_SUMS / 2], field[p][DOT]) : field[p][DOT];
  }
  // Rounding can take the merged sum of squares just below 0 where the row is constant.
  const float rstd =
      inverse_root(not_below_zero(warp_sum<LANES>(squares)) * inverse_columns + eps);
  if (BACKWARD) dot = warp_sum<LANES>(dot) * inverse_columns * rstd;
  return {shift, rstd, sum_gw, dot};
}

#if SINGLE_REFERENCE
// One reference for all warps of a row: cheaper statistics, for 16-bit elements.
//
// The reference is the mean of the row's first four elements, which each thread reads itself. Sums
// about it simply add up: no shuffle for the reference, no second loop over the warps' entries, no
// counts. For n columns of deviation s the reference is off by s sqrt(n / 4) at worst, which leaves
// n / 4 units in the last place of float32 in the variance: 2^-12 for 16384 columns. The row's mean
// is then one float, off by 2^-24 of itself, while 16-bit elements beside it are at least 2^-11 of
// it apart.
static_assert(N % 4 == 0, "the reference is read as one vector of four elements");

// The slow path of __fsqrt_rn is a call, and ptxas keeps few floats over a call: with the fast root,
// four vectors a thread spilled 208 bytes; one vector a thread spills none with the precise root.
#ifndef PRECISE_ROOT
#define PRECISE_ROOT (VECS_PER_THREAD > 1)
#endif

// The sums of one warp; aligned so that one load reads them all.
struct alignas(4 * NUM_SUMS) WarpEntry { float at[NUM_SUMS]; };

// Lanes that share the reading of a row's entries; each reads four at most.
constexpr int READ_LANES = power_of_two((ROW_WARPS + 3) / 4);
constexpr int READS_PER_LANE = (ROW_WARPS + READ_LANES - 1) / READ_LANES;

// As publish_partials, for a row of one block.
__device__ __forceinline__ float publish_partials(const PartialSums& partials, WarpEntry* table) {
  const float total = reduce_scatter(partials);
  const int lane = threadIdx.x % 32;
  if (ROW_WARPS > 1 && lane % (32 / NUM_SUMS) == 0)
    table[threadIdx.x % TEAM / 32].at[lane / (32 / NUM_SUMS)] = total;
  return total;
}

// As merge_partials.
__device__ __forceinline__ RowStatistics add_partials(float total, const WarpEntry* table,
                                                      float inverse_columns, float eps) {
  WarpEntry sums = {};
  if (ROW_WARPS == 1) {
#pragma unroll
    for (int k = 0; k < NUM_SUMS; ++k)
      sums.at[k] = __shfl_sync(0xffffffffu, total, k * (32 / NUM_SUMS));
  } else {
#pragma unroll
    for (int p = 0; p < READS_PER_LANE; ++p) {
      const int row_warp = threadIdx.x % READ_LANES * READS_PER_LANE + p;
      if (READ_LANES * READS_PER_LANE > ROW_WARPS && row_warp >= ROW_WARPS) continue;
      const WarpEntry entry = table[row_warp];
#pragma unroll
      for (int k = 0; k < NUM_SUMS; ++k) sums.at[k] = p ? sums.at[k] + entry.at[k] : entry.at[k];
    }
#pragma unroll
    for (int k = 0; k < NUM_SUMS; ++k) sums.at[k] = warp_sum<READ_LANES>(sums.at[k]);
  }
  const float shift = CENTRED ? sums.at[0] * inverse_columns : 0.0f;
  const float mean_gw = CENTRED ? sums.at[NUM_SUMS / 2] * inverse_columns : 0.0f;
  const float square = sums.at[SQUARES] * inverse_columns, dot = sums.at[DOT] * inverse_columns;
  const float variance = CENTRED ? fmaf(-shift, shift, square) : square;
  const float rstd = PRECISE_ROOT ? inverse_root(not_below_zero(variance) + eps)
                                  : rsqrtf(not_below_zero(variance) + eps);
  return {shift, rstd, mean_gw, (CENTRED ? fmaf(-shift, mean_gw, dot) : dot) * rstd};
}
#endif
