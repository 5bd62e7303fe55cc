// CUDA's words for g++: what a learner's file sees. The functions are in memory.cpp, threads.cpp and host.cpp.
//
// The file is compiled with -fsanitize=thread and -fsanitize-coverage=trace-pc, and linked with neither of their
// libraries: memory.cpp defines the functions that the compiler inserts before each access and in each basic
// block, and counts and checks there. So a file needs no marks of its own, and its pointers are plain ones.
#pragma once
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
// Sections with names that are identifiers: the linker provides their start and end.
#define __shared__ static __attribute__((section("weft_shared")))
#define __constant__ static __attribute__((section("weft_constant")))
#define __ldg(pointer) (*(pointer))

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 { unsigned x, y, z; };
extern const uint3 threadIdx, blockIdx;
extern const uint3 blockDim, gridDim;
constexpr int warpSize = 32;

// Copies of vector types are one access of 8 or 16 bytes, as on a GPU; g++ would copy them in pieces.
void weft_copy(void* to, const void* from, int bytes);
#define WEFT_INLINE inline __attribute__((always_inline))
#define WEFT_COPIES(NAME, BYTES)                                                    \
  NAME() = default;                                                                 \
  WEFT_INLINE NAME(const NAME& other) { weft_copy(this, &other, BYTES); }           \
  WEFT_INLINE NAME& operator=(const NAME& other) { weft_copy(this, &other, BYTES); return *this; }
#define WEFT_VECTOR2(NAME, T)                                                       \
  struct alignas(2 * sizeof(T)) NAME {                                              \
    T x, y;                                                                         \
    NAME(T x_, T y_) : x(x_), y(y_) {}                                              \
    WEFT_COPIES(NAME, 2 * sizeof(T))                                                \
  };                                                                                \
  inline NAME make_##NAME(T x, T y) { return NAME(x, y); }
#define WEFT_VECTOR4(NAME, T)                                                       \
  struct alignas(4 * sizeof(T)) NAME {                                              \
    T x, y, z, w;                                                                   \
    NAME(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}                    \
    WEFT_COPIES(NAME, 4 * sizeof(T))                                                \
  };                                                                                \
  inline NAME make_##NAME(T x, T y, T z, T w) { return NAME(x, y, z, w); }
WEFT_VECTOR2(float2, float)
WEFT_VECTOR4(float4, float)
WEFT_VECTOR2(int2, int)
WEFT_VECTOR4(int4, int)
WEFT_VECTOR2(uint2, unsigned)
WEFT_VECTOR4(uint4, unsigned)

// Threads of a block and of a warp.
void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);
void __threadfence();
void __threadfence_block();
unsigned __ballot_sync(unsigned mask, int predicate);
int __any_sync(unsigned mask, int predicate);
int __all_sync(unsigned mask, int predicate);
#define WEFT_SHUFFLES(T)                                                            \
  T __shfl_sync(unsigned mask, T value, int lane, int width = 32);                  \
  T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32);         \
  T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32);       \
  T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32);
WEFT_SHUFFLES(int)
WEFT_SHUFFLES(unsigned)
WEFT_SHUFFLES(float)
WEFT_SHUFFLES(double)
WEFT_SHUFFLES(long long)
unsigned __reduce_add_sync(unsigned mask, unsigned value);

#define WEFT_ATOMICS(T)                                                             \
  T atomicAdd(T* address, T value);                                                 \
  T atomicExch(T* address, T value);
#define WEFT_INTEGER_ATOMICS(T)                                                     \
  WEFT_ATOMICS(T)                                                                   \
  T atomicSub(T* address, T value);                                                 \
  T atomicMax(T* address, T value);                                                 \
  T atomicMin(T* address, T value);                                                 \
  T atomicCAS(T* address, T expected, T value);
WEFT_ATOMICS(float)
WEFT_ATOMICS(double)
WEFT_INTEGER_ATOMICS(int)
WEFT_INTEGER_ATOMICS(unsigned)
WEFT_INTEGER_ATOMICS(unsigned long long)

#define WEFT_EXTREMES(T) T max(T a, T b); T min(T a, T b);
WEFT_EXTREMES(int)
WEFT_EXTREMES(unsigned)
WEFT_EXTREMES(long long)
WEFT_EXTREMES(size_t)
WEFT_EXTREMES(float)
WEFT_EXTREMES(double)
float rsqrtf(float x);
float __expf(float x);
float __logf(float x);
float __fdividef(float x, float y);
float __int_as_float(int x);
int __float_as_int(float x);
int __popc(unsigned x);
int __ffs(int x);
int __clz(int x);

// The host's functions.
typedef int cudaError_t;
constexpr cudaError_t cudaSuccess = 0;
struct WeftStream;
struct WeftEvent;
typedef WeftStream* cudaStream_t;
typedef WeftEvent* cudaEvent_t;
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
cudaError_t weft_malloc(void** pointer, size_t bytes, size_t size, const char* type, const char* text);
cudaError_t weft_malloc_host(void** pointer, size_t bytes);
template <typename T> struct WeftType { static constexpr size_t size = sizeof(T); static const char* name() { return "element"; } };
template <> struct WeftType<void> { static constexpr size_t size = 0; static const char* name() { return "element"; } };
#define WEFT_NAMED(T) \
  template <> struct WeftType<T> { static constexpr size_t size = sizeof(T); static const char* name() { return #T; } };
WEFT_NAMED(float)
WEFT_NAMED(double)
WEFT_NAMED(int)
WEFT_NAMED(float4)
template <typename T> cudaError_t weft_malloc_typed(T** pointer, size_t bytes, const char* text) {
  return weft_malloc((void**)pointer, bytes, WeftType<T>::size, WeftType<T>::name(), text);
}
#define cudaMalloc(pointer, bytes) weft_malloc_typed(pointer, bytes, #pointer)
template <typename T> cudaError_t cudaMallocHost(T** pointer, size_t bytes) {
  return weft_malloc_host((void**)pointer, bytes);
}
cudaError_t cudaFree(void* pointer);
cudaError_t cudaFreeHost(void* pointer);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* to, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = nullptr);
cudaError_t weft_to_symbol(void* symbol, size_t size, const void* from, size_t bytes);
template <typename T> cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t bytes) {
  return weft_to_symbol((void*)&symbol, sizeof symbol, from, bytes);
}
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaGetLastError();
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);

// kernel<<<grid, block, shared, stream>>>(arguments) is rewritten to weft_launch(kernel, ...)(arguments).
struct WeftBody {
  virtual void run() = 0;
  virtual ~WeftBody() {}
};
void weft_enqueue(WeftBody* body, const char* name, dim3 grid, dim3 block, size_t shared, cudaStream_t stream);
extern unsigned char weft_dynamic_shared[];
#define WEFT_PLAIN __attribute__((no_sanitize("thread")))

template <typename F> struct WeftCall : WeftBody {
  F call;
  WEFT_PLAIN WeftCall(F f) : call(f) {}
  WEFT_PLAIN void run() override { call(); }
};
template <typename... P> struct WeftLauncher {
  void (*kernel)(P...);
  const char* name;
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
  WEFT_PLAIN void operator()(P... arguments) const {
    auto function = kernel;
    auto call = [=]() WEFT_PLAIN { function(arguments...); };
    weft_enqueue(new WeftCall<decltype(call)>(call), name, grid, block, shared, stream);
  }
};
template <typename... P>
WEFT_PLAIN WeftLauncher<P...> weft_launch_named(const char* name, void (*kernel)(P...), dim3 grid, dim3 block,
                                                size_t shared = 0, cudaStream_t stream = nullptr) {
  return WeftLauncher<P...>{kernel, name, grid, block, shared, stream};
}
#define WEFT_TEXT(x) #x
#define WEFT_LINE(line) WEFT_TEXT(line)
#define weft_launch(kernel, ...) \
  weft_launch_named(#kernel " (line " WEFT_LINE(__LINE__) ")", kernel, __VA_ARGS__)

// The grader's calls: an argument comes as 64 bits.
extern double weft_result;
template <typename T> struct WeftArgument { static T of(long long bits) { return (T)bits; } };
template <> struct WeftArgument<double> {
  static double of(long long bits) { double v; memcpy(&v, &bits, sizeof v); return v; }
};
template <> struct WeftArgument<float> {
  static float of(long long bits) { return (float)WeftArgument<double>::of(bits); }
};
