// Depthwise causal convolution with TAPS coefficients a channel, and its three gradients in one pass.
//
// A warp has a piece of one row (one channel of one sequence). Each thread has VEC neighbouring elements, one
// access (16 bytes where all rows are aligned to them), and the channel's coefficients in registers. The
// elements beside its own come from other lanes by a shuffle each; the first lanes need those of the access
// before, which the last lanes still have. Bytes: n read, n written forward; 2n read, n written backward.
#include "reduce.cuh"
#include "two_sum.cuh"
#include "words.cuh"

#ifndef VEC
#define VEC 4
#endif
#ifndef TAPS
#define TAPS 4
#endif
#ifndef THREADS
#define THREADS 128
#endif

constexpr int UNROLL = 4;  // accesses of a thread that are in flight together
constexpr int STEP = 32 * VEC;  // elements of a warp's access
constexpr int HALO = TAPS - 1;
constexpr unsigned ALL = 0xffffffffu;
using Pack = Words<WEFT_T, VEC>;

// Which piece of which row a warp has: `pieces` of piece_size elements each, a multiple of STEP.
struct Place {
  index_t batch, channel, first, last;
  __device__ __forceinline__ Place(index_t item, index_t channels, index_t length, index_t pieces,
                                   index_t piece_size) {
    first = item % pieces * piece_size;
    last = min(first + piece_size, length);
    channel = item / pieces % channels;
    batch = item / pieces / channels;
  }
};

// Loads the access at `at` of a row of `length` elements; zeros outside. VEC divides the length.
__device__ __forceinline__ Pack load_pack(const WEFT_T* row, index_t at, index_t length) {
  return at >= 0 && at < length ? load_words<WEFT_T, VEC>(row + at) : no_words<WEFT_T, VEC>();
}

// Fills a window with a thread's elements and the HALO elements before them. `before` is the warp's previous
// access. All lanes of the warp take part.
__device__ __forceinline__ void look_left(float (&window)[HALO + VEC], const Pack& before, const Pack& own) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 1; h <= HALO; ++h) {
    // Element h to the left is number j of the lane `away` to the left.
    const int away = (h + VEC - 1) / VEC, j = away * VEC - h;
    // The last lanes are asked for their previous elements alone, by the first lanes.
    const float sent = lane >= 32 - away ? element(before, j) : element(own, j);
    window[HALO - h] = __shfl_sync(ALL, sent, (lane + 32 - away) % 32);
  }
#pragma unroll
  for (int j = 0; j < VEC; ++j) window[HALO + j] = element(own, j);
}

// Fills a window with a thread's elements and the HALO elements after them; `after` is the next access.
__device__ __forceinline__ void look_right(float (&window)[HALO + VEC], const Pack& own, const Pack& after) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < VEC; ++j) window[j] = element(own, j);
#pragma unroll
  for (int h = 0; h < HALO; ++h) {
    const int away = (VEC + h) / VEC, j = (VEC + h) % VEC;
    const float sent = lane < away ? element(after, j) : element(own, j);
    window[VEC + h] = __shfl_sync(ALL, sent, (lane + away) % 32);
  }
}

// x: (batches, channels, length), sequences at batch_stride and rows at row_stride elements; weight:
// (channels, TAPS); bias: (channels,); y: (batches, channels, length) contiguous. A warp an item.
extern "C" __global__ void __launch_bounds__(THREADS)
conv1d(const WEFT_T* __restrict__ x, const WEFT_T* __restrict__ weight, const WEFT_T* __restrict__ bias,
       WEFT_T* __restrict__ y, index_t items, index_t channels, index_t length, index_t batch_stride,
       index_t row_stride, index_t pieces, index_t piece_size) {
  const index_t item = (index_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (item >= items) return;
  const Place place(item, channels, length, pieces, piece_size);
  const index_t own = threadIdx.x % 32 * VEC;
  const WEFT_T* row = x + place.batch * batch_stride + place.channel * row_stride;
  WEFT_T* target = y + (place.batch * channels + place.channel) * length;
  float w[TAPS];
#pragma unroll
  for (int k = 0; k < TAPS; ++k) w[k] = to_float(weight[place.channel * TAPS + k]);
  const float constant = to_float(bias[place.channel]);
  // Of the access before the piece, the last lanes alone are asked.
  Pack before = load_pack(row, own >= STEP - HALO - VEC ? place.first - STEP + own : -1, length);
  for (index_t start = place.first; start < place.last; start += UNROLL * STEP) {
    Pack packs[UNROLL];
    // Tests beside each load would be a third of the instructions that are not multiplications.
    const bool is_whole = start + UNROLL * STEP <= place.last;
    if (is_whole) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) packs[u] = load_words<WEFT_T, VEC>(row + start + u * STEP + own);
    } else {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) packs[u] = load_pack(row, start + u * STEP + own, place.last);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float window[HALO + VEC], out[VEC];
      look_left(window, before, packs[u]);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        out[j] = constant;
#pragma unroll
        for (int k = 0; k < TAPS; ++k) out[j] = fmaf(w[k], window[j + k], out[j]);
      }
      const index_t at = start + u * STEP + own;
      if (is_whole || at < place.last) store_words(target + at, to_words<WEFT_T, VEC>(out));
      before = packs[u];
    }
  }
}

// Adds the terms of a thread's elements to the sums of coefficients: x at `at` times the gradient k places
// later. With `ENDS` a term whose gradient is beyond the row is left out, also where x is NaN.
template <bool ENDS>
__device__ __forceinline__ void add_terms(float (&terms)[TAPS], const Pack& x,
                                          const float (&window)[HALO + VEC], index_t at, index_t length) {
#pragma unroll
  for (int j = 0; j < VEC; ++j)
#pragma unroll
    for (int k = 0; k < TAPS; ++k)
      if (!ENDS || at + j + k < length) terms[k] = fmaf(element(x, j), window[j + k], terms[k]);
}

// grad, x: (batches, channels, length), each with strides of its own; weight: (channels, TAPS); dx:
// (batches, channels, length) contiguous; parts: (channels, TAPS + 1, batches * pieces) float32, the sums of
// each warp's elements.
//
// The gradient of x at t is the sum of weight[TAPS-1-k] grad[t + k]. That of weight[TAPS-1-k] is the sum over
// t of x[t] grad[t + k]: x at the element alone is loaded. That of the bias is the sum of grad.
extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
conv1d_backward(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ x,
                const WEFT_T* __restrict__ weight, WEFT_T* __restrict__ dx, float* __restrict__ parts,
                index_t items, index_t channels, index_t length, index_t grad_batch_stride,
                index_t grad_row_stride, index_t x_batch_stride, index_t x_row_stride, index_t pieces,
                index_t piece_size) {
  const index_t item = (index_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (item >= items) return;
  const Place place(item, channels, length, pieces, piece_size);
  const index_t own = threadIdx.x % 32 * VEC;
  const WEFT_T* grad_row = grad + place.batch * grad_batch_stride + place.channel * grad_row_stride;
  const WEFT_T* x_row = x + place.batch * x_batch_stride + place.channel * x_row_stride;
  WEFT_T* target = dx + (place.batch * channels + place.channel) * length;
  float w[TAPS];
#pragma unroll
  for (int k = 0; k < TAPS; ++k) w[k] = to_float(weight[place.channel * TAPS + TAPS - 1 - k]);
  TwoSum sums[TAPS + 1];
  Pack current = load_pack(grad_row, place.first + own, length);
  for (index_t start = place.first; start < place.last; start += UNROLL * STEP) {
    Pack next[UNROLL], packs[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const index_t at = start + u * STEP + own;
      next[u] = load_pack(grad_row, at + STEP, length);
      packs[u] = load_pack(x_row, at, place.last);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const index_t at = start + u * STEP + own;
      if (start + u * STEP >= place.last) break;  // all lanes alike
      float window[HALO + VEC], out[VEC], terms[TAPS] = {};
      look_right(window, current, next[u]);
      if (start + (u + 1) * STEP + HALO <= length) add_terms<false>(terms, packs[u], window, at, length);
      else add_terms<true>(terms, packs[u], window, at, length);
      float total = 0.0f;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        total += window[j];
        out[j] = 0.0f;
#pragma unroll
        for (int k = 0; k < TAPS; ++k) out[j] = fmaf(w[k], window[j + k], out[j]);
      }
#pragma unroll
      for (int k = 0; k < TAPS; ++k) sums[k].add(terms[k]);
      sums[TAPS].add(total);
      if (at < place.last) store_words(target + at, to_words<WEFT_T, VEC>(out));
      current = next[u];
    }
  }
  const index_t count = items / channels, part = place.batch * pieces + item % pieces;
#pragma unroll
  for (int k = 0; k <= TAPS; ++k) {
    const float total = warp_sum(sums[k].value());
    const int to = k < TAPS ? TAPS - 1 - k : TAPS;
    if (threadIdx.x % 32 == 0) parts[(place.channel * (TAPS + 1) + to) * count + part] = total;
  }
}

// parts: (rows, count) float32, a row for each of a channel's TAPS coefficients and its bias; dweight:
// (channels, TAPS); dbias: (channels,). A warp adds a row, in an order that follows from its length alone.
extern "C" __global__ void __launch_bounds__(THREADS)
conv1d_sums(const float* __restrict__ parts, WEFT_T* __restrict__ dweight, WEFT_T* __restrict__ dbias,
            index_t rows, index_t count) {
  const index_t row = (index_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  TwoSum sum;
  for (index_t i = threadIdx.x % 32; i < count; i += 32) sum.add(parts[row * count + i]);
  const float total = warp_sum(sum.value());
  if (threadIdx.x % 32) return;
  const index_t channel = row / (TAPS + 1), k = row % (TAPS + 1);
  WEFT_T* to = k < TAPS ? dweight + channel * TAPS + k : dbias + channel;
  *to = from_float<WEFT_T>(total);
}
