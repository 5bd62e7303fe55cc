// Reductions across a warp and across a block, shared by the operators' kernels.
//
// Every thread of the warp or block must call, and every thread gets the same bits. T is float,
// double or int: whatever a shuffle carries.
#pragma once

struct Add {
  template <typename T> static __device__ __forceinline__ T nothing() { return T(0); }
  template <typename T> static __device__ __forceinline__ T merge(T a, T b) { return a + b; }
};

// The larger of two; fmaxf drops a NaN, so that a caller must find it again (x - max does).
struct Max {
  template <typename T> static __device__ __forceinline__ T nothing() {
    return -T(__int_as_float(0x7f800000));
  }
  template <typename T> static __device__ __forceinline__ T merge(T a, T b) {
    return fmax(a, b);
  }
};

// Butterfly over groups of WIDTH neighbouring lanes; WIDTH is a power of two up to 32.
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

// One value a warp through `scratch` (shared memory, 32 values), one barrier. The block's size is a
// multiple of 32. Between two calls with the same scratch the caller needs a barrier of its own;
// two scratches used by turns need none, as each call's barrier frees the one before.
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
