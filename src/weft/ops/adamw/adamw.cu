// AdamW, one step in place: g = clip grad, m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
// p = p decay - size m / (sqrt(v) widen + eps). WEFT_P, WEFT_G, WEFT_M are the types of parameter,
// gradient and averages.
//
// A thread takes N neighbouring elements of every stream, by 16-byte accesses, all loaded before
// the first is used. Bytes an element, all float32: 16 read, 12 written.
#include "numeric.cuh"
#include "reduce.cuh"

constexpr int N = sizeof(WEFT_P) == 2 || sizeof(WEFT_G) == 2 || sizeof(WEFT_M) == 2 ? 8 : 4;
constexpr int WIDTH = 6;  // of a table's row: see tables.py

struct Numbers {
  float decay, size, widen, eps, beta1, rest1, beta2, rest2;
};

template <typename T> __device__ __forceinline__ void take(const T* from, float (&to)[N]) {
  constexpr int PIECE = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int i = 0; i < N; i += PIECE) {
    const auto v = *reinterpret_cast<const Vector<T, PIECE>*>(from + i);
#pragma unroll
    for (int j = 0; j < PIECE; ++j) to[i + j] = to_float(v.at[j]);
  }
}

template <typename T> __device__ __forceinline__ void give(T* to, const float (&from)[N]) {
  constexpr int PIECE = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int i = 0; i < N; i += PIECE) {
    Vector<T, PIECE> v;
#pragma unroll
    for (int j = 0; j < PIECE; ++j) v.at[j] = from_float<T>(from[i + j]);
    *reinterpret_cast<Vector<T, PIECE>*>(to + i) = v;
  }
}

__device__ __forceinline__ void update(float& p, float g, float& m, float& v, const Numbers& n) {
  m = fmaf(n.beta1, m, n.rest1 * g);
  v = fmaf(n.beta2, v, n.rest2 * g * g);
  p = fmaf(p, n.decay, -n.size * __fdividef(m, fmaf(sqrtf(v), n.widen, n.eps)));
}

#if STOCHASTIC
// Philox 4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
__device__ __forceinline__ uint4 philox(uint4 c, unsigned k0, unsigned k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
    const unsigned h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
    c = make_uint4(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// float to bfloat16, still as a float: 16 random bits are added below the cut.
__device__ __forceinline__ float cut(float p, unsigned noise) {
  const float down = __uint_as_float((__float_as_uint(p) + noise) & 0xFFFF0000u);
  return fabsf(p) < __int_as_float(0x7f800000) ? down : p;
}

__device__ __forceinline__ unsigned noise_of(const uint4& words, int i) {
  const unsigned word = i < 4 ? (i < 2 ? words.x : words.y) : (i < 6 ? words.z : words.w);
  return i % 2 ? word >> 16 : word & 0xFFFFu;
}
#endif

struct Streams {
  WEFT_P* param;
  const WEFT_G* grad;
  WEFT_M* exp_avg;
  WEFT_M* exp_avg_sq;
  float* master;
  index_t n;
};

// Elements at to at + N of one parameter; `wide`: all addresses are 16-byte aligned.
__device__ __forceinline__ void step(const Streams& s, index_t at, bool wide, float clip,
                                     const Numbers& numbers, unsigned seed, unsigned turn,
                                     unsigned row) {
  if (at >= s.n) return;
#if STOCHASTIC
  const index_t group = at / 8;
  const uint4 words = philox(
      make_uint4((unsigned)group, (unsigned)(group >> 32), row, turn), seed, 0u);
#endif
  if (wide && at + N <= s.n) {
    float p[N], g[N], m[N], v[N];
    take(s.grad + at, g);
    take(s.exp_avg + at, m);
    take(s.exp_avg_sq + at, v);
#if MASTER
    take(s.master + at, p);
#else
    take(s.param + at, p);
#endif
#pragma unroll
    for (int i = 0; i < N; ++i) update(p[i], g[i] * clip, m[i], v[i], numbers);
    give(s.exp_avg + at, m);
    give(s.exp_avg_sq + at, v);
#if MASTER
    give(s.master + at, p);
#endif
#if STOCHASTIC
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] = cut(p[i], noise_of(words, i));
#endif
    give(s.param + at, p);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < N && at + i < s.n; ++i) {
    const index_t k = at + i;
    float m = to_float(s.exp_avg[k]), v = to_float(s.exp_avg_sq[k]);
#if MASTER
    float p = s.master[k];
#else
    float p = to_float(s.param[k]);
#endif
    update(p, to_float(s.grad[k]) * clip, m, v, numbers);
    s.exp_avg[k] = from_float<WEFT_M>(m);
    s.exp_avg_sq[k] = from_float<WEFT_M>(v);
#if MASTER
    s.master[k] = p;
#endif
#if STOCHASTIC
    p = cut(p, noise_of(words, i));
#endif
    s.param[k] = from_float<WEFT_P>(p);
  }
}

// factors: [clip, size, widen, turn], or null.
__device__ __forceinline__ float read(const float* factors, Numbers& numbers, index_t& turn) {
  if (!factors) return 1.0f;
  const float4 f = *reinterpret_cast<const float4*>(factors);
  numbers.size = f.y;
  numbers.widen = f.z;
  turn += (index_t)f.w;
  return f.x;
}

#define NUMBERS                                                                              \
  float decay, float size, float widen, float eps, float beta1, float rest1, float beta2,    \
      float rest2, index_t seed, index_t turn, index_t place
#define GATHERED Numbers numbers{decay, size, widen, eps, beta1, rest1, beta2, rest2}

extern "C" __global__ void __launch_bounds__(THREADS)
adamw_one(WEFT_P* param, const WEFT_G* grad, WEFT_M* exp_avg, WEFT_M* exp_avg_sq, float* master,
          index_t n, index_t wide, const float* factors, NUMBERS) {
  GATHERED;
  const float clip = read(factors, numbers, turn);
  const Streams s{param, grad, exp_avg, exp_avg_sq, master, n};
  const index_t at = ((index_t)blockIdx.x * THREADS + threadIdx.x) * N;
  step(s, at, wide, clip, numbers, (unsigned)seed, (unsigned)turn, (unsigned)(place << 20));
}

// An address out of a table is an address in global memory, which the compiler cannot know.
template <typename T> __device__ __forceinline__ T* global(index_t address) {
  return static_cast<T*>(__cvta_global_to_generic(static_cast<size_t>(address)));
}

// table: (6 rows + 2 chunks,), see tables.py; a chunk of CHUNK elements a block.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw_many(const index_t* __restrict__ table, index_t rows, index_t wide, const float* factors,
           NUMBERS) {
  GATHERED;
  const float clip = read(factors, numbers, turn);
  const index_t* chunk = table + rows * WIDTH + 2 * (index_t)blockIdx.x;
  const index_t row = chunk[0], first = chunk[1];
  const index_t* entry = table + row * WIDTH;
  const Streams s{global<WEFT_P>(entry[0]), global<const WEFT_G>(entry[1]),
                  global<WEFT_M>(entry[2]), global<WEFT_M>(entry[3]),
                  global<float>(entry[4]),  entry[5]};
#pragma unroll 1
  for (int at = threadIdx.x * N; at < CHUNK; at += THREADS * N)
    step(s, first + at, wide, clip, numbers, (unsigned)seed, (unsigned)turn,
         (unsigned)((place << 20) + row));
}

// The sum of squares of `count` elements: a thread its own, then the block, always in this order.
__device__ __forceinline__ void squares(const WEFT_G* grad, index_t count, bool wide, float* to) {
  __shared__ float scratch[32];
  constexpr int V = 16 / sizeof(WEFT_G);
  float total = 0.0f;
  const int vectors = wide ? (int)(count / V) : 0;
#pragma unroll 8
  for (int at = threadIdx.x; at < vectors; at += THREADS) {
    const auto g = reinterpret_cast<const Vector<WEFT_G, V>*>(grad)[at];
#pragma unroll
    for (int i = 0; i < V; ++i) total = fmaf(to_float(g.at[i]), to_float(g.at[i]), total);
  }
#pragma unroll 1
  for (int at = vectors * V + threadIdx.x; at < count; at += THREADS) {
    const float g = to_float(grad[at]);
    total = fmaf(g, g, total);
  }
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) *to = total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
adamw_norm(const WEFT_G* grad, index_t n, index_t wide, float* partials) {
  const index_t first = (index_t)blockIdx.x * NORM_CHUNK;
  const index_t count = n - first < NORM_CHUNK ? n - first : NORM_CHUNK;
  squares(grad + first, count, wide, partials + blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
adamw_norm_many(const index_t* __restrict__ table, index_t rows, index_t wide, float* partials) {
  const index_t* chunk = table + rows * WIDTH + 2 * (index_t)blockIdx.x;
  const index_t* entry = table + chunk[0] * WIDTH;
  const index_t first = chunk[1], n = entry[5];
  const index_t count = n - first < NORM_CHUNK ? n - first : NORM_CHUNK;
  squares(global<const WEFT_G>(entry[1]) + first, count, wide, partials + blockIdx.x);
}

// One block. partials: (count,), added in double; step: one float, or null where the step is a
// number; factors: (4,). log1, log2: of the betas. 1 - beta^t in double: it cancels.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw_factors(const float* partials, index_t count, const float* step, float* factors, float lr,
              float log1, float log2, float size, float widen, float max_norm) {
  __shared__ double scratch[32];
  double total = 0.0;
  for (index_t i = threadIdx.x; i < count; i += THREADS) total += partials[i];
  total = block_sum(total, scratch);
  if (threadIdx.x != 0) return;
  const float scale = max_norm / ((float)sqrt(total) + 1e-6f);
  // A norm that is NaN makes every gradient NaN, as torch's clipping does.
  factors[0] = count == 0 || scale > 1.0f ? 1.0f : scale;
  if (step) {
    size = (float)(lr / -expm1(*step * (double)log1));
    widen = (float)(1.0 / sqrt(-expm1(*step * (double)log2)));
  }
  factors[1] = size;
  factors[2] = widen;
  factors[3] = step ? *step : 0.0f;
}
