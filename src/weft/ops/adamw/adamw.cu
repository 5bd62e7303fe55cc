// One step of AdamW: g = clip grad, m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
// p = p decay - size m / (sqrt(v) correction + eps), with size = lr / (1 - b1^t), correction =
// 1 / sqrt(1 - b2^t) and decay = 1 - lr weight_decay, computed once by the host or by adamw_factors. WEFT_P,
// WEFT_G, WEFT_M are the types of parameter, gradient and averages. All arithmetic is in float32.
//
// A thread steps N neighbouring elements of every tensor, by 16-byte accesses, and loads all of them before
// it uses the first. Bytes of an element, all float32: 16 read, 12 written.
#include "numeric.cuh"
#include "reduce.cuh"

// With a 16-bit tensor N is 8, so that its access has 16 bytes; the float32 tensors then take two accesses.
constexpr int N = sizeof(WEFT_P) == 2 || sizeof(WEFT_G) == 2 || sizeof(WEFT_M) == 2 ? 8 : 4;
constexpr int WIDTH = 6;  // numbers in a row of the table, see parameter_groups.py

struct Numbers {
  float decay, size, correction, eps, beta1, rest1, beta2, rest2;
};

// PIECE is what one 16-byte access holds. A float row of eight elements is two pieces, which are in flight
// together.
template <typename T> __device__ __forceinline__ void load_elements(const T* from, float (&to)[N]) {
  constexpr int PIECE = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int i = 0; i < N; i += PIECE) {
    const auto v = *reinterpret_cast<const Vector<T, PIECE>*>(from + i);
#pragma unroll
    for (int j = 0; j < PIECE; ++j) to[i + j] = to_float(v.at[j]);
  }
}

template <typename T> __device__ __forceinline__ void store_elements(T* to, const float (&from)[N]) {
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
  // eps is added after the correction of sqrt(v), as in torch's AdamW. __fdividef (2 ulp) is about the cost
  // of a reciprocal; the update is small beside p, so that its last bits do not reach the parameter.
  m = fmaf(n.beta1, m, n.rest1 * g);
  v = fmaf(n.beta2, v, n.rest2 * g * g);
  p = fmaf(p, n.decay, -n.size * __fdividef(m, fmaf(sqrtf(v), n.correction, n.eps)));
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

// Round float to bfloat16 stochastically, still as a float: add 16 random bits below the cut, then truncate.
// The rounding is unbiased: the chance to round up equals the distance from the lower neighbour.
// Infinities and NaN are left alone: the addition could turn one into the other.
__device__ __forceinline__ float round_stochastic(float p, unsigned noise) {
  const float down = __uint_as_float((__float_as_uint(p) + noise) & 0xFFFF0000u);
  return fabsf(p) < __int_as_float(0x7f800000) ? down : p;
}

__device__ __forceinline__ unsigned noise_bits(const uint4& words, int i) {
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

// Step elements at to at + N of one parameter; `wide`: all addresses are 16-byte aligned.
__device__ __forceinline__ void step(const Streams& s, index_t at, bool wide, float clip,
                                     const Numbers& numbers, unsigned seed, unsigned step_count,
                                     unsigned row) {
  if (at >= s.n) return;
#if STOCHASTIC
  // One Philox call gives 128 bits: 16 for each of eight elements. The counter has the element's group, the
  // parameter's row and the step, so that no two elements of a run share random bits.
  const index_t group = at / 8;
  const uint4 words = philox(
      make_uint4((unsigned)group, (unsigned)(group >> 32), row, step_count), seed, 0u);
#endif
  if (wide && at + N <= s.n) {
    // All four streams are loaded before the arithmetic, so that their latencies overlap.
    float p[N], g[N], m[N], v[N];
    load_elements(s.grad + at, g);
    load_elements(s.exp_avg + at, m);
    load_elements(s.exp_avg_sq + at, v);
#if MASTER
    load_elements(s.master + at, p);
#else
    load_elements(s.param + at, p);
#endif
#pragma unroll
    for (int i = 0; i < N; ++i) update(p[i], g[i] * clip, m[i], v[i], numbers);
    store_elements(s.exp_avg + at, m);
    store_elements(s.exp_avg_sq + at, v);
#if MASTER
    store_elements(s.master + at, p);
#endif
#if STOCHASTIC
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] = round_stochastic(p[i], noise_bits(words, i));
#endif
    store_elements(s.param + at, p);
    return;
  }
  // The last elements of a parameter, and parameters that are not 16-byte aligned (a view into a flat
  // buffer).
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
    p = round_stochastic(p, noise_bits(words, i));
#endif
    s.param[k] = from_float<WEFT_P>(p);
  }
}

// The factors are on the device if gradients are clipped or the step is a tensor: the host then need not wait
// for the norm.
// factors: [clip, size, correction, step_count], or null.
__device__ __forceinline__ float read_factors(const float* factors, Numbers& numbers, index_t& step_count) {
  if (!factors) return 1.0f;
  const float4 f = *reinterpret_cast<const float4*>(factors);
  numbers.size = f.y;
  numbers.correction = f.z;
  step_count += (index_t)f.w;
  return f.x;
}

#define NUMBER_PARAMETERS                                                                              \
  float decay, float size, float correction, float eps, float beta1, float rest1, float beta2,    \
      float rest2, index_t seed, index_t step_count, index_t group_index
#define DECLARE_NUMBERS Numbers numbers{decay, size, correction, eps, beta1, rest1, beta2, rest2}

extern "C" __global__ void __launch_bounds__(THREADS)
adamw_one(WEFT_P* param, const WEFT_G* grad, WEFT_M* exp_avg, WEFT_M* exp_avg_sq, float* master,
          index_t n, index_t wide, const float* factors, NUMBER_PARAMETERS) {
  DECLARE_NUMBERS;
  const float clip = read_factors(factors, numbers, step_count);
  const Streams s{param, grad, exp_avg, exp_avg_sq, master, n};
  const index_t at = ((index_t)blockIdx.x * THREADS + threadIdx.x) * N;
  step(s, at, wide, clip, numbers, (unsigned)seed, (unsigned)step_count, (unsigned)(group_index << 20));
}

// Return a pointer from an address of the table. The compiler cannot know that it is in global memory;
// without this it uses generic accesses.
template <typename T> __device__ __forceinline__ T* global(index_t address) {
  return static_cast<T*>(__cvta_global_to_generic(static_cast<size_t>(address)));
}

// One launch for all parameters: with hundreds of small tensors the launches would take longer than the step.
// A chunk belongs to one parameter, so that a block reads its table entry once.
// table: (6 rows + 2 chunks,), see parameter_groups.py; a block steps one chunk of CHUNK elements.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw_many(const index_t* __restrict__ table, index_t rows, index_t wide, const float* factors,
           NUMBER_PARAMETERS) {
  DECLARE_NUMBERS;
  const float clip = read_factors(factors, numbers, step_count);
  const index_t* chunk = table + rows * WIDTH + 2 * (index_t)blockIdx.x;
  const index_t row = chunk[0], first = chunk[1];
  const index_t* entry = table + row * WIDTH;
  const Streams s{global<WEFT_P>(entry[0]), global<const WEFT_G>(entry[1]),
                  global<WEFT_M>(entry[2]), global<WEFT_M>(entry[3]),
                  global<float>(entry[4]),  entry[5]};
#pragma unroll 1
  for (int at = threadIdx.x * N; at < CHUNK; at += THREADS * N)
    step(s, first + at, wide, clip, numbers, (unsigned)seed, (unsigned)step_count,
         (unsigned)((group_index << 20) + row));
}

// Write the sum of squares of `count` elements, summed by each thread and then by the block, always in this
// order.
__device__ __forceinline__ void squares(const WEFT_G* grad, index_t count, bool wide, float* to) {
  __shared__ float scratch[32];
  constexpr int V = 16 / sizeof(WEFT_G);
  float total = 0.0f;
  const int vectors = wide ? (int)(count / V) : 0;
#pragma unroll 8
  for (int at = threadIdx.x; at < vectors; at += THREADS) {
    const auto g = reinterpret_cast<const Vector<WEFT_G, V>*>(grad)[at];
    // float32 suffices within a chunk of NORM_CHUNK elements; adamw_factors adds the chunks in double.
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

// One block. partials: (count,), summed in double; step: one float, or null if the step is a number;
// factors: (4,). log1, log2: logarithms of the betas. 1 - beta^t is in double because it cancels.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw_factors(const float* partials, index_t count, const float* step, float* factors, float lr,
              float log1, float log2, float size, float correction, float max_norm) {
  __shared__ double scratch[32];
  double total = 0.0;
  for (index_t i = threadIdx.x; i < count; i += THREADS) total += partials[i];
  total = block_sum(total, scratch);
  if (threadIdx.x != 0) return;
  // 1e-6 is torch's constant in clip_grad_norm_, and avoids a division by zero.
  const float scale = max_norm / ((float)sqrt(total) + 1e-6f);
  // A NaN norm makes every gradient NaN, as torch's clipping does.
  factors[0] = count == 0 || scale > 1.0f ? 1.0f : scale;
  if (step) {
    // 1 - beta^t = -expm1(t log beta): no digit is lost, also for betas near 1 and t = 1.
    size = (float)(lr / -expm1(*step * (double)log1));
    correction = (float)(1.0 / sqrt(-expm1(*step * (double)log2)));
  }
  factors[1] = size;
  factors[2] = correction;
  factors[3] = step ? *step : 0.0f;
}
