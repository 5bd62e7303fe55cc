// Bandwidth by streaming reads of 16-byte vectors; neighbouring threads read neighbouring vectors. A
// thread has four loads in flight and an SM 1024 threads: 64 KiB in flight in each SM, more than
// latency times bandwidth of any level. The values are added up, and the sum is stored only if it is a
// value that no data give. The compiler cannot know that, so it keeps the loads; they are volatile too.
typedef long long index_t;

constexpr int THREADS = 1024;
constexpr int UNROLL = 4;
constexpr float IMPOSSIBLE_SUM = -1.2345e30f;

struct L1Load {
  static __device__ __forceinline__ float4 at(const float4* p) {
    float4 v;
    asm volatile("ld.global.ca.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p));
    return v;
  }
};

struct L2Load {
  static __device__ __forceinline__ float4 at(const float4* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p));
    return v;
  }
};

struct SharedLoad {
  static __device__ __forceinline__ float4 at(const float4* p) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"((unsigned int)__cvta_generic_to_shared(p)));
    return v;
  }
};

__device__ __forceinline__ void add(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

__device__ __forceinline__ void store_if_impossible(const float4& sum, float* sink) {
  const float all = sum.x + sum.y + sum.z + sum.w;
  if (all == IMPOSSIBLE_SUM) *sink = all;
}

// The block reads `vectors` vectors cyclically; each thread makes `rounds` times UNROLL loads. `step` is
// THREADS modulo vectors, so that a subtraction wraps the index around without a division.
template <class Load>
__device__ __forceinline__ void read_cyclic(float4& sum, const float4* data, int vectors, int rounds) {
  int at = threadIdx.x % vectors;
  const int step = THREADS % vectors;
  for (int i = 0; i < rounds; ++i) {
    float4 in[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      in[k] = Load::at(data + at);
      at += step;
      if (at >= vectors) at -= vectors;
    }
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) add(sum, in[k]);
  }
}

// cycles: (gridDim.x,). Every block, one for each SM, reads all of data: `warm` untimed rounds, then
// `rounds` timed ones, which read rounds x UNROLL x THREADS x 16 bytes.
template <class Load>
__device__ __forceinline__ void timed(const float4* data, int vectors, int warm, int rounds,
                                      float* sink, long long* cycles) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  read_cyclic<Load>(sum, data, vectors, warm);
  __syncthreads();  // all warps start the timed rounds together
  const long long first = clock64();
  read_cyclic<Load>(sum, data, vectors, rounds);
  __syncthreads();  // the clock stops after the slowest warp
  const long long last = clock64();
  if (threadIdx.x == 0) cycles[blockIdx.x] = last - first;
  store_if_impossible(sum, sink);
}

// data: (vectors,), the same for all SMs, so that lines evicted from the L1 are still in the L2.
extern "C" __global__ void __launch_bounds__(THREADS)
read_l1(const float4* data, index_t vectors, index_t warm, index_t rounds, float* sink,
        long long* cycles) {
  timed<L1Load>(data, (int)vectors, (int)warm, (int)rounds, sink, cycles);
}

// The same from shared memory; the block copies data into it first.
extern "C" __global__ void __launch_bounds__(THREADS)
read_shared(const float4* data, index_t vectors, index_t warm, index_t rounds, float* sink,
            long long* cycles) {
  extern __shared__ float4 staged[];
  for (int i = threadIdx.x; i < vectors; i += THREADS) staged[i] = data[i];
  __syncthreads();
  timed<SharedLoad>(staged, (int)vectors, (int)warm, (int)rounds, sink, cycles);
}

// data: (vectors,), vectors a multiple of gridDim.x * THREADS. The blocks, one for each SM, together
// read data `passes` times. The same SM reads a vector in every pass, so that an L2 of two halves keeps
// as few lines twice as possible. Bytes: passes * vectors * 16 read.
extern "C" __global__ void __launch_bounds__(THREADS)
read_all(const float4* data, index_t vectors, index_t passes, float* sink) {
  const index_t wide = (index_t)gridDim.x * THREADS;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (index_t pass = 0; pass < passes; ++pass) {
    index_t i = (index_t)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (UNROLL - 1) * wide < vectors; i += UNROLL * wide) {
      float4 in[UNROLL];
#pragma unroll
      for (int k = 0; k < UNROLL; ++k) in[k] = L2Load::at(data + i + k * wide);
#pragma unroll
      for (int k = 0; k < UNROLL; ++k) add(sum, in[k]);
    }
    for (; i < vectors; i += wide) add(sum, L2Load::at(data + i));
  }
  store_if_impossible(sum, sink);
}

// from, to: (vectors,), one vector for each thread. Bytes: 16 vectors read + as many written.
extern "C" __global__ void copy_all(const float4* __restrict__ from, float4* __restrict__ to,
                                    index_t vectors) {
  const index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < vectors) to[i] = from[i];
}
