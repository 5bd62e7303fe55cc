// Reductions of a tensor (outer, n, inner) along n: sum, mean, amax, amin, logsumexp, argmax, argmin.
//
// reduce_rows: a group of lanes for each row of adjacent elements, for short rows or very many. reduce_parts:
// a block for a row, or for one of several parts of it. reduce_columns: a thread has a vector of adjacent
// columns; the block's rows of threads stride over n. merge_parts: some lanes for each result of several
// parts.
//
// Every thread issues 64 bytes of loads before it uses the first. Rows of any alignment are read in 16-byte
// vectors, and up to VEC - 1 elements on either side one by one. The order of a sum follows from the shape
// and the launch alone. Bytes: the input once; a partial result for each part, written and read again.
#include "numeric.cuh"

#define SUM 0
#define MEAN 1
#define AMAX 2
#define AMIN 3
#define LOGSUMEXP 4
#define ARGMAX 5
#define ARGMIN 6
#ifndef OP
#define OP SUM
#endif
#ifndef VEC_WIDTH
#define VEC_WIDTH (16 / sizeof(WEFT_T))  // of columns; rows always have vectors of 16 bytes
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef THREAD_BYTES
#define THREAD_BYTES 64
#endif

constexpr unsigned ALL = 0xffffffffu;
constexpr int WARPS = THREADS / 32;
// Blocks for which an SM has room at least. Where none are named, the compiler spills a few registers for a
// fifth or sixth block, although three have 48 KiB of loads in flight.
constexpr bool HAS_LARGE_PARTIALS = OP >= LOGSUMEXP && sizeof(WEFT_T) == 2;
constexpr int BLOCKS_AN_SM = HAS_LARGE_PARTIALS || (VEC_WIDTH) * sizeof(WEFT_T) < 16 ? 3 : 4;
constexpr bool FINDS_LEAST = OP == AMIN || OP == ARGMIN;
constexpr bool IS_INDEX = OP == ARGMAX || OP == ARGMIN;

// Type in which elements are compared and added: int for int, float for the others.
__device__ __forceinline__ int widen(int v) { return v; }
template <typename T> __device__ __forceinline__ float widen(T v) { return to_float(v); }
using Value = decltype(widen(WEFT_T()));
template <bool> struct ResultOf { using Type = WEFT_T; };
template <> struct ResultOf<true> { using Type = index_t; };
using Result = typename ResultOf<IS_INDEX>::Type;

template <int N> __device__ __forceinline__ Value pick(const Vector<WEFT_T, N>& v, int j) {
  if constexpr (sizeof(WEFT_T) == 2) return element(v, j);
  else return widen(v.at[j]);
}

// The value of an element that is not there: it changes no result.
__device__ __forceinline__ float absent(float) {
  if (OP == SUM || OP == MEAN) return 0.0f;
  return __uint_as_float(FINDS_LEAST ? 0x7f800000u : 0xff800000u);
}
__device__ __forceinline__ int absent(int) { return FINDS_LEAST ? 0x7fffffff : -0x7fffffff - 1; }

template <typename T> __device__ __forceinline__ bool is_nan(T v) { return v != v; }

// True if `a` replaces `b`: NaN beats all, and nothing beats a NaN.
template <typename T> __device__ __forceinline__ bool beats(T a, T b) {
  const bool wins = FINDS_LEAST ? a < b : a > b;
  return wins || (is_nan(a) && !is_nan(b));
}
// The better of two floats; NaN if either is.
__device__ __forceinline__ float better(float a, float b) {
#ifdef __CUDA_ARCH__
  float c;
  if (FINDS_LEAST) asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  else asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
#else
  return beats(a, b) ? a : b;
#endif
}

__device__ __forceinline__ int better(int a, int b) { return beats(a, b) ? a : b; }

// 2^v within 2 units in the last place; results below 2^-126 are 0, which saves exp2f's scaling of these.
__device__ __forceinline__ float power_of_two(float v) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
#else
  return exp2f(v);
#endif
}

__device__ __forceinline__ index_t exchange(index_t v, int step) {
  const unsigned low = __shfl_xor_sync(ALL, (unsigned)v, step);
  const unsigned high = __shfl_xor_sync(ALL, (unsigned)((unsigned long long)v >> 32), step);
  return (index_t)((unsigned long long)high << 32 | low);
}

// Adds v[0] to v[N - 1] by a tree: an error of log2(N) roundings and not of N.
template <int N> __device__ __forceinline__ float tree(const float (&v)[N]) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    float sums[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = v[i] + v[i + N / 2];
    return tree(sums);
  }
}

// A partial result. `take` adds N elements, of which the first has number i and the others follow `step`
// apart; `merge` adds another part; `exchanged` is the part of the lane whose number differs in `step`.
#if OP == SUM || OP == MEAN
struct Partial {
  float sum = 0.0f;
  template <int N> __device__ __forceinline__ void take(const float (&v)[N], index_t, index_t) {
    sum += tree(v);
  }
  __device__ __forceinline__ void merge(const Partial& other) { sum += other.sum; }
  __device__ __forceinline__ Partial exchanged(int step) const {
    Partial other;
    other.sum = __shfl_xor_sync(ALL, sum, step);
    return other;
  }
  __device__ __forceinline__ WEFT_T result(index_t n) const {
    return from_float<WEFT_T>(OP == MEAN ? sum / (float)n : sum);
  }
};

#elif OP == AMAX || OP == AMIN
struct Partial {
  float value = absent(0.0f);
  template <int N> __device__ __forceinline__ void take(const float (&v)[N], index_t, index_t) {
#pragma unroll
    for (int i = 0; i < N; ++i) value = better(v[i], value);
  }
  __device__ __forceinline__ void merge(const Partial& other) { value = better(other.value, value); }
  __device__ __forceinline__ Partial exchanged(int step) const {
    Partial other;
    other.value = __shfl_xor_sync(ALL, value, step);
    return other;
  }
  __device__ __forceinline__ WEFT_T result(index_t) const { return from_float<WEFT_T>(value); }
};

#elif OP == LOGSUMEXP
// The sum of exponentials as a multiple of that of the largest element, so that none overflows. Where that is
// infinite or NaN, it is a multiple of 1: the sum is then Inf, 0 or NaN, as the result needs it. A comparison
// beside each element, for Inf - Inf, would be a fifth of all instructions.
struct Partial {
  float largest = absent(0.0f), sum = 0.0f;
  static __device__ __forceinline__ float unit(float top) {
    return fabsf(top) < __uint_as_float(0x7f800000u) ? top : 0.0f;
  }
  static __device__ __forceinline__ float weight(float v, float unit) {
    return power_of_two((v - unit) * 1.44269504f);
  }
  template <int N> __device__ __forceinline__ void take(const float (&v)[N], index_t, index_t) {
    float top = largest;
#pragma unroll
    for (int i = 0; i < N; ++i) top = better(v[i], top);
    float weights[N];
    const float one = unit(top);
#pragma unroll
    for (int i = 0; i < N; ++i) weights[i] = weight(v[i], one);
    sum = sum * weight(largest, one) + tree(weights);
    largest = top;
  }
  __device__ __forceinline__ void merge(const Partial& other) {
    const float top = better(other.largest, largest), one = unit(top);
    sum = sum * weight(largest, one) + other.sum * weight(other.largest, one);
    largest = top;
  }
  __device__ __forceinline__ Partial exchanged(int step) const {
    Partial other;
    other.largest = __shfl_xor_sync(ALL, largest, step);
    other.sum = __shfl_xor_sync(ALL, sum, step);
    return other;
  }
  __device__ __forceinline__ WEFT_T result(index_t) const { return from_float<WEFT_T>(largest + logf(sum)); }
};

#else
// The best element and the least index of those that equal it. A thread meets its elements in the order of
// their numbers, so that only a better one replaces the first.
constexpr index_t NOWHERE = 0x7fffffffffffffffll;
struct Partial {
  Value value = absent(Value());
  index_t index = NOWHERE;
  template <int N> __device__ __forceinline__ void take(const Value (&v)[N], index_t i, index_t step) {
    // The best of all first, one instruction an element. Its place is looked for only where it is a new one.
    Value best = v[0];
#pragma unroll
    for (int k = 1; k < N; ++k) best = better(v[k], best);
    // The first element, which is there, may equal the value that stands for none.
    if (!beats(best, value) && index != NOWHERE) return;
    int place = 0;
    if (is_nan(best)) {
#pragma unroll
      for (int k = N - 1; k >= 0; --k) place = is_nan(v[k]) ? k : place;
    } else {
#pragma unroll
      for (int k = N - 1; k >= 0; --k) place = v[k] == best ? k : place;
    }
    value = best;
    index = i + place * step;
  }
  __device__ __forceinline__ void merge(const Partial& other) {
    const bool is_tie = value == other.value || (is_nan(value) && is_nan(other.value));
    if (beats(other.value, value) || (is_tie && other.index < index)) *this = other;
  }
  __device__ __forceinline__ Partial exchanged(int step) const {
    Partial other;
    other.value = __shfl_xor_sync(ALL, value, step);
    other.index = exchange(index, step);
    return other;
  }
  __device__ __forceinline__ index_t result(index_t) const { return index; }
};

#endif

// Merges the partial results of groups of `lanes` neighbouring lanes, in every one of them.
__device__ __forceinline__ void merge_lanes(Partial& p, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    const Partial other = p.exchanged(step);
    // The lower lane's part comes first in both lanes, so that both add in one order.
    if (threadIdx.x & step) {
      Partial both = other;
      both.merge(p);
      p = both;
    } else {
      p.merge(other);
    }
  }
}

constexpr int VEC = 16 / sizeof(WEFT_T), UNROLL = THREAD_BYTES / 16;

__device__ __forceinline__ void take_vector(Partial& p, const Vector<WEFT_T, VEC>& vector, index_t first) {
  Value v[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) v[j] = pick(vector, j);
  p.take(v, first, 1);
}

// Returns the partial result of elements begin to end of a row, of which the thread takes every `threads`-th
// vector from its own number on.
__device__ __forceinline__ Partial walk_row(const WEFT_T* __restrict__ row, index_t begin, index_t end,
                                            int thread, int threads) {
  using Pack = Vector<WEFT_T, VEC>;
  Partial p;
  const index_t count = end - begin;
  const WEFT_T* first = row + begin;
  // Vectors begin at the next multiple of 16 bytes.
  const index_t before = ((16 - (reinterpret_cast<size_t>(first) & 15)) & 15) / sizeof(WEFT_T);
  const index_t head = before < count ? before : count, vectors = (count - head) / VEC;
#pragma unroll 1
  for (index_t i = thread; i < head; i += threads) {
    const Value v[1] = {widen(first[i])};
    p.take(v, begin + i, 1);
  }
  const Pack* wide = reinterpret_cast<const Pack*>(first + head);
  // All loads of a round are issued before the first is used; a test beside each of them would prevent that.
  index_t at = thread;
#pragma unroll 1
  for (; at + (UNROLL - 1) * (index_t)threads < vectors; at += UNROLL * (index_t)threads) {
    Pack packs[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) packs[u] = wide[at + u * (index_t)threads];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      take_vector(p, packs[u], begin + head + (at + u * (index_t)threads) * VEC);
  }
  Pack packs[UNROLL - 1];
#pragma unroll
  for (int u = 0; u < UNROLL - 1; ++u)
    if (at + u * (index_t)threads < vectors) packs[u] = wide[at + u * (index_t)threads];
#pragma unroll
  for (int u = 0; u < UNROLL - 1; ++u)
    if (at + u * (index_t)threads < vectors)
      take_vector(p, packs[u], begin + head + (at + u * (index_t)threads) * VEC);
#pragma unroll 1
  for (index_t i = head + vectors * VEC + thread; i < count; i += threads) {
    const Value v[1] = {widen(first[i])};
    p.take(v, begin + i, 1);
  }
  return p;
}

// Merges the partial results of a block of THREADS threads, in thread 0.
__device__ __forceinline__ void merge_block(Partial& p, Partial* shared) {
  merge_lanes(p, 32);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = p;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < WARPS; ++w) p.merge(shared[w]);
}

// x: (rows, n), rows at `stride` elements, elements adjacent; y: (rows,). A row has `lanes` neighbouring
// lanes, a power of two up to 32.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
reduce_rows(const WEFT_T* __restrict__ x, Result* __restrict__ y, index_t rows, index_t n, index_t stride,
            index_t lanes) {
  const int group = (int)lanes, lane = threadIdx.x & (group - 1);
  const index_t row = (index_t)blockIdx.x * (THREADS / group) + threadIdx.x / group;
  // A group without a row goes on with no elements: the shuffles name all lanes of its warp.
  Partial p = walk_row(x + (row < rows ? row : 0) * stride, 0, row < rows ? n : 0, lane, group);
  merge_lanes(p, group);
  if (lane == 0 && row < rows) y[row] = p.result(n);
}

// x, y: as above; partials: (rows, parts), written if there are several parts of part_n elements. A block has
// a part of a row.
extern "C" __global__ void __launch_bounds__(THREADS)
reduce_parts(const WEFT_T* __restrict__ x, Result* __restrict__ y, Partial* __restrict__ partials, index_t n,
             index_t stride, index_t parts, index_t part_n) {
  __shared__ index_t memory[WARPS * sizeof(Partial) / 4];  // without constructors, which shared memory lacks
  Partial* shared = reinterpret_cast<Partial*>(memory);
  const index_t row = blockIdx.x / parts, part = blockIdx.x % parts, begin = part * part_n;
  const index_t end = begin + part_n < n ? begin + part_n : n;
  Partial p = walk_row(x + row * stride, begin, end, (int)threadIdx.x, THREADS);
  merge_block(p, shared);
  if (threadIdx.x) return;
  if (parts == 1) y[row] = p.result(n);
  else partials[row * parts + part] = p;
}

// partials: (results, parts) by strides; y: (results,). A result has `lanes` neighbouring lanes, a power of
// two.
extern "C" __global__ void __launch_bounds__(THREADS)
merge_parts(const Partial* __restrict__ partials, Result* __restrict__ y, index_t results, index_t n,
            index_t parts, index_t result_stride, index_t part_stride, index_t lanes) {
  const int group = (int)lanes, lane = (int)threadIdx.x & (group - 1);
  const index_t at = (index_t)blockIdx.x * (THREADS / group) + threadIdx.x / group;
  // A group without a result goes on with no parts: the shuffles name all lanes of its warp.
  const index_t count = at < results ? parts : 0;
  Partial p;
#pragma unroll 4
  for (index_t i = lane; i < count; i += group) p.merge(partials[at * result_stride + i * part_stride]);
  merge_lanes(p, group);
  if (lane == 0 && at < results) y[at] = p.result(n);
}

// x: (outer, n, inner), columns adjacent, rows at n_stride and outer indices at outer_stride elements, all
// multiples of COLUMN_VEC as inner is; y: (outer, inner); partials: (parts, outer, inner), written if there
// are several parts of part_n rows, at most 2^30. The threads of a block are `width` vectors of columns,
// times `height` rows, times as many outer indices as fit: short columns leave threads for these. All three
// are powers of two.
constexpr int COLUMN_VEC = VEC_WIDTH, THREAD_VECS = THREAD_BYTES / (COLUMN_VEC * (int)sizeof(WEFT_T));
constexpr int ROWS = THREAD_VECS < 16 ? THREAD_VECS : 16;  // loads of a thread before the first is used

using ColumnPack = Vector<WEFT_T, COLUMN_VEC>;
__device__ __forceinline__ ColumnPack load_row(const WEFT_T* base, index_t row, index_t n_stride) {
  return *reinterpret_cast<const ColumnPack*>(base + row * n_stride);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
reduce_columns(const WEFT_T* __restrict__ x, Result* __restrict__ y, Partial* __restrict__ partials,
               index_t outers, index_t n, index_t inner, index_t outer_stride, index_t n_stride,
               index_t parts, index_t part_n, index_t width, index_t height) {
  constexpr int SHARED = THREADS / 2 * COLUMN_VEC;
  __shared__ index_t memory[SHARED * sizeof(Partial) / 8];
  Partial* shared = reinterpret_cast<Partial*>(memory);
  const int area = (int)(width * height), thread = (int)threadIdx.x;
  const int across = thread & ((int)width - 1), down = (thread & (area - 1)) / (int)width;
  const index_t tiles = (inner + width * COLUMN_VEC - 1) / (width * COLUMN_VEC);
  // Blocks that run together have neighbouring tiles of the same rows, which are near each other in memory.
  const index_t tile = blockIdx.x % tiles, part = blockIdx.x / tiles % parts;
  const index_t outer = blockIdx.x / tiles / parts * (THREADS / area) + thread / area;
  const index_t column = (tile * width + across) * COLUMN_VEC, begin = part * part_n;
  // Rows of a part have 32 bits: 64 of them in every sum would take registers that hold loads.
  const int rows = (int)(begin + part_n < n ? part_n : n - begin), step = (int)height;
  const bool has_columns = column < inner && outer < outers;
  Partial p[COLUMN_VEC];
  const WEFT_T* base = x + outer * outer_stride + begin * n_stride + column;
  int row = has_columns ? down : rows;
#pragma unroll 1
  for (; row + (ROWS - 1) * step < rows; row += ROWS * step) {
    ColumnPack packs[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) packs[r] = load_row(base, row + r * step, n_stride);
#pragma unroll
    for (int j = 0; j < COLUMN_VEC; ++j) {
      Value v[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) v[r] = pick(packs[r], j);
      p[j].take(v, begin + row, step);
    }
  }
  // The last rows of the thread, of which there may be fewer than a round has.
  if (row < rows) {
    ColumnPack packs[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (row + r * step < rows) packs[r] = load_row(base, row + r * step, n_stride);
#pragma unroll
    for (int j = 0; j < COLUMN_VEC; ++j) {
      Value v[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) v[r] = row + r * step < rows ? pick(packs[r], j) : absent(Value());
      p[j].take(v, begin + row, step);
    }
  }
  // The rows of threads are halved: the upper half hands its results over.
  for (int half = (int)height / 2; half > 0; half /= 2) {
    const int slot = thread / area * (area / 2) + down % half * (int)width + across;
    if (down >= half && down < 2 * half)
#pragma unroll
      for (int j = 0; j < COLUMN_VEC; ++j) shared[j * (THREADS / 2) + slot] = p[j];
    __syncthreads();
    if (down < half)
#pragma unroll
      for (int j = 0; j < COLUMN_VEC; ++j) p[j].merge(shared[j * (THREADS / 2) + slot]);
    __syncthreads();
  }
  if (down || !has_columns) return;
#pragma unroll
  for (int j = 0; j < COLUMN_VEC; ++j) {
    const index_t at = outer * inner + column + j;
    if (parts == 1) y[at] = p[j].result(n);
    else partials[part * outers * inner + at] = p[j];
  }
}
