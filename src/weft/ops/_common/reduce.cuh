// Reductions across a warp and across a block.
//
// Every thread of the warp or block must call them, and every thread gets the same bits. T is any type that a
// shuffle moves: float, double or int.
#pragma once

// An operation: its identity element (`nothing`), and how two values combine (`merge`).
struct Add {
  template <typename T> static __device__ __forceinline__ T nothing() { return T(0); }
  template <typename T> static __device__ __forceinline__ T merge(T a, T b) { return a + b; }
};

// The maximum. fmaxf drops a NaN: the caller must detect it elsewhere (x - max is NaN for x = NaN).
struct Max {
  template <typename T> static __device__ __forceinline__ T nothing() {
    return -T(__int_as_float(0x7f800000));  // -inf
  }
  template <typename T> static __device__ __forceinline__ T merge(T a, T b) {
    return fmax(a, b);
  }
};

// Butterfly over groups of WIDTH neighbouring lanes; WIDTH is a power of two up to 32.
// xor pairs: both lanes of a pair compute the same value, because the operations commute. Every lane ends
// with the same bits, and no broadcast is needed.
template <typename Op, int WIDTH = 32, typename T>
__device__ __forceinline__ T warp_reduce(T v) {
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step /= 2)
    v = Op::merge(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}

template <int WIDTH = 32, typename T> __device__ __forceinline__ T warp_sum(T v) {
  return warp_reduce<Add, WIDTH>(v);
}
template <int WIDTH = 32, typename T> __device__ __forceinline__ T warp_max(T v) {
  return warp_reduce<Max, WIDTH>(v);
}

// Reduces over a block whose size is a multiple of 32, with one barrier. `scratch` is shared memory for 32
// values, one a warp; every warp reduces these again, which saves a second barrier for a broadcast. Two calls
// with the same scratch need a barrier between them, since a fast warp may overwrite what a slow one has not
// read. Two scratches used in turn need none: the barrier of each call protects the other scratch.
template <typename Op, typename T> __device__ __forceinline__ T block_reduce(T v, T* scratch) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  v = warp_reduce<Op>(v);
  if (lane == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_reduce<Op>(lane < warps ? scratch[lane] : Op::template nothing<T>());
}

template <typename T> __device__ __forceinline__ T block_sum(T v, T* scratch) {
  return block_reduce<Add>(v, scratch);
}
template <typename T> __device__ __forceinline__ T block_max(T v, T* scratch) {
  return block_reduce<Max>(v, scratch);
}
